"""The loop as a LangGraph graph that saves its state after every node: killed anywhere, it continues where it was.

    aim ─► steer ─► think ─► act ─┬─► think          (it read something)
                      ▲           ├─► steer ─► think (its proposal was not taken, and rounds are left; or a person wants more)
                      └───────────┘   └─► end        (its proposal passed the quick check, or nothing is left to spend)

``aim`` asks the role what there is to do; ``think`` is one exchange with the model; ``act`` answers the tools that it called; ``steer`` asks
the person, if there is one. The state holds plain JSON values only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

from agents.core.proposal import Edit, Proposal, gain_words
from agents.core.untrusted import one_line, visible
from agents.core.workbench import Workbench
from agents.llm.client import Client
from agents.llm.exchange import Message
from agents.loop import checkpoints, prompts
from agents.loop.role import DraftError, JsonObject, Role
from agents.loop.tools import PROPOSE, TRY

GO, STOP = ("", "go"), ("stop", "quit")  # a person's answers; any other is an instruction for the model
Person = Callable[[str], str]
FORMAT = 2  # of ``State``: a run of an older format starts again


class State(TypedDict, total=False):
    """``draft``: the last proposal that could be read, as ``_packed``; ``taken``: it passed the quick check; ``tried``: the model
    has just proposed; ``about`` and ``facts``: the aim's."""

    about: str
    facts: JsonObject
    messages: list[Message]
    exchanges: int
    rounds: int
    draft: dict[str, Any]
    taken: bool
    problem: str
    tried: bool
    ended: str


@dataclass(frozen=True)
class LoopRun:
    """One run. ``saved``: the SQLite file of the checkpoints, or a PostgreSQL address; ``person``: answers between rounds."""

    number: int
    role: Role
    workbench: Workbench
    client: Client
    saved: Path | str
    person: Person | None = None
    say: Callable[[str], None] = lambda _: None


def work(run: LoopRun) -> tuple[Proposal | None, str]:
    """(the proposal or None, why the run ended). Called again with the same number after a kill, it continues.

    Raises: TargetError; LlmError; CheckpointError; what the workbench's sandbox raises. The run can be continued after each.
    """
    from langgraph.types import Command

    with checkpoints.opened(run.saved) as saver:
        graph = _Loop(run).graph().compile(checkpointer=saver)
        steps = 4 * (run.client.policy.exchanges + run.client.policy.rounds) + 20
        config: Any = {"configurable": {"thread_id": _thread(run.role.name, run.number)}, "recursion_limit": steps}
        known = graph.get_state(config)
        given: Any = None if known.values or known.next else {"rounds": 0}
        if known.values and known.next:
            run.say(f"  run {run.number} continues")
        while True:
            waiting = graph.get_state(config).interrupts
            if waiting:
                question = waiting[0].value
                given = Command(resume=run.person(question) if run.person else GO[0])
            state = graph.invoke(given, config, durability="sync")
            given = None
            if not graph.get_state(config).next:
                break
    draft = _unpacked(state["draft"]) if state.get("taken") and not state.get("ended") else None
    return draft, state.get("ended") or state.get("problem") or ""


def forget(saved: Path | str, agent: str, number: int) -> None:
    """Drop the checkpoints of a run that is over. Raises: SavedRunError."""
    if isinstance(saved, str) or saved.exists():
        with checkpoints.opened(saved) as saver:
            saver.delete_thread(_thread(agent, number))


def _thread(agent: str, number: int) -> str:
    return f"{agent}-{number}-{FORMAT}"


class _Loop:
    """The graph's nodes over one run."""

    def __init__(self, run: LoopRun) -> None:
        self.run, self.role, self.policy = run, run.role, run.client.policy

    def graph(self) -> Any:
        from langgraph.graph import END, START, StateGraph

        made = StateGraph(State)  # type: ignore[type-var]
        for name in ("aim", "steer", "think", "act"):
            made.add_node(name, getattr(self, name))
        made.add_edge(START, "aim")
        made.add_conditional_edges("aim", lambda s: END if s.get("ended") else "steer", ["steer", END])
        made.add_conditional_edges(
            "steer", lambda s: END if s.get("ended") or s.get("taken") else "think", ["think", END]
        )
        made.add_edge("think", "act")
        made.add_conditional_edges("act", self.after_act, ["think", "steer", END])
        return made

    def aim(self, state: State) -> State:
        """What to do, and the first messages."""
        aim = self.role.aim(self.policy.rounds)
        if isinstance(aim, str):
            return {"ended": aim}
        self.run.say(f"  {aim.about}")
        messages = [{"role": "system", "content": self.role.system}, {"role": "user", "content": aim.prompt}]
        started: State = {"exchanges": 0, "rounds": 0, "taken": False, "tried": False}
        return {"about": aim.about, "facts": aim.facts, "messages": messages} | started

    def think(self, state: State) -> State:
        """One exchange."""
        number = state["exchanges"] + 1
        reply = self.run.client.ask(
            f"{self.role.name}-{self.run.number}-{number:03d}", state["messages"], self.role.tools
        )
        return {"messages": [*state["messages"], reply.message()], "exchanges": number}

    def act(self, state: State) -> State:
        """Answer the tools that the model called; a proposal is read and checked."""
        answers: list[Message] = []
        update: State = {"tried": False}
        for call in state["messages"][-1].get("tool_calls", []):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if name != PROPOSE:
                text = self.role.answer(state["facts"], name, arguments)
            elif update["tried"]:
                text = "One proposal at a time: this one was ignored."
            else:
                update |= self.judge(arguments, state)  # type: ignore[typeddict-item]
                left = self.policy.rounds - update["rounds"]
                text = prompts.TAKEN if update["taken"] else f"{update['problem']}\n{prompts.AGAIN.format(left=left)}"
            answers.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        answers = answers or [{"role": "user", "content": prompts.CALL_A_TOOL}]
        update["messages"] = [*state["messages"], *answers]
        if not update.get("taken"):
            update |= self.spent(update.get("rounds", state["rounds"]), state["exchanges"], update, state)  # type: ignore[typeddict-item]
        return update

    def judge(self, arguments: str, state: State) -> State:
        """Read and check a proposal; ``problem`` says what is wrong with it, for the model."""
        run, number = self.run, state["rounds"] + 1
        update: State = {"tried": True, "rounds": number, "taken": False}
        try:
            draft = self.role.draft(state["facts"], arguments, _last(TRY, state["messages"]))
        except DraftError as error:
            problem = f"The proposal cannot be read: {error}"
        else:
            update["draft"] = _packed(draft)
            run.say(f"  round {number}: {draft.title} (predicted {gain_words(draft.target, draft.predicted_gain)})")
            before = [a for a in run.workbench.history(draft.target) if a.patch_id == draft.patch_id]
            if any(attempt.outcome == "reject" for attempt in before):
                problem = "The gate rejected the same patch before."
            else:
                problem = self.role.check(state["facts"], draft)
        shown = one_line(problem, 200) if problem else "passes the quick check"
        run.say(f"  round {number}: {shown}")
        return update | {"problem": problem, "taken": not problem}  # type: ignore[return-value]

    def spent(self, rounds: int, exchanges: int, update: State, state: State) -> State:
        """Why the run ends now, if it does."""
        last = one_line(update.get("problem", state.get("problem", "")) or "nothing was proposed", 300)
        if rounds >= self.policy.rounds:
            return {"ended": f"none of {rounds} proposals passed the quick check; the last: {last}"}
        if exchanges >= self.policy.exchanges:
            return {"ended": f"none of the proposals in {exchanges} exchanges passed the quick check; the last: {last}"}
        return {}

    def after_act(self, state: State) -> str:
        from langgraph.graph import END

        if state.get("ended"):
            return str(END)
        return "steer" if state["tried"] else "think"

    def steer(self, state: State) -> State:
        """Ask the person: continue, stop, or an instruction. Without a person, continue."""
        if self.run.person is None:
            return {"problem": state.get("problem", "")}
        from langgraph.types import interrupt

        answer = str(interrupt(_question(state))).strip()
        if answer.lower() in STOP:
            return {"ended": "stopped by the person who runs it"}
        if answer.lower() in GO:
            return {"problem": state.get("problem", "")}
        if state["rounds"] >= self.policy.rounds or state["exchanges"] >= self.policy.exchanges:
            self.run.say("  no proposals are left: the run ends with what it has")
            return {"problem": state.get("problem", "")}
        text = prompts.STEER.format(text=visible(answer, 4000))
        return {"messages": [*state["messages"], {"role": "user", "content": text}], "taken": False}


def _question(state: State) -> str:
    """The question to a person between rounds."""
    draft = state.get("draft")
    words = [state["about"]]
    if draft:
        edits = ", ".join(one_line(path, 100) for path, _ in draft["edits"])
        words += [f"round {state['rounds']}: {draft['title']}", f"  {draft['hypothesis']}", f"  edits {edits}"]
        words.append("  passes the quick check" if state["taken"] else f"  {visible(state.get('problem', ''), 1500)}")
    enter = "send it to the gate" if state.get("taken") else "continue"
    return "\n".join([*words, f"[enter: {enter}; 'stop'; anything else is an instruction for the model]"])


def _last(tool: str, messages: list[Message]) -> str:
    """The arguments of the last call of a tool; '': none."""
    calls = [call["function"] for message in messages for call in message.get("tool_calls", [])]
    return next((str(call["arguments"]) for call in reversed(calls) if call["name"] == tool), "")


def _packed(draft: Proposal) -> dict[str, Any]:
    return {**vars(draft), "edits": [[edit.path, edit.new_text] for edit in draft.edits]}


def _unpacked(raw: dict[str, Any]) -> Proposal:
    made = Proposal(**{**raw, "edits": ()})
    return replace(made, edits=tuple(Edit(path, text) for path, text in raw["edits"]))
