"""The loop as a LangGraph graph. It saves its state after every node, so that a run can continue after a kill at any moment.

    aim ─► steer ─► think ─► act ─┬─► think          (it read something)
                      ▲           ├─► steer ─► think (its proposal did not pass, and rounds are left; or a person wants more)
                      └───────────┘   └─► end        (its proposal passed the quick check, or nothing is left to spend)

``aim`` asks the role what to do. ``think`` is one exchange with the model. ``act`` answers the tools that the model called. ``steer`` asks the
person, if there is one. The state holds plain JSON values only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

from agents.core.proposal import Edit, Proposal, format_gain
from agents.core.untrusted import fold_to_one_line, shorten_text
from agents.core.workbench import Workbench
from agents.llm.client import LlmClient
from agents.llm.exchange import ChatMessage
from agents.loop import checkpoints, prompts
from agents.loop.role import DraftError, JsonObject, Role, read_decline_reason
from agents.loop.tools import DECLINE, PROPOSE, TRY
from kernels.contract.message import Message, messages_to_json

GO, STOP = ("", "go"), ("stop", "quit")  # a person's answers; any other answer is an instruction for the model
Person = Callable[[str], str]
FORMAT = 2  # of ``AgentGraphState``: a run that an older format saved starts again


class AgentGraphState(TypedDict, total=False):
    """The state between nodes. ``draft``: the last proposal that could be read, as ``_packed`` returns it. ``taken``: True if that proposal
    passed the quick check. ``tried``: True if the model has just proposed. ``about`` and ``facts``: those of the ``AgentTask``. ``problem`` and
    ``ended``: texts, or messages as ``messages_to_json`` returns them. ``target``: that of the ``AgentTask``; older runs have none."""

    about: str
    facts: JsonObject
    messages: list[ChatMessage]
    exchanges: int
    rounds: int
    draft: dict[str, Any]
    taken: bool
    problem: Any
    tried: bool
    ended: Any
    target: str


@dataclass(frozen=True)
class AgentLoopRun:
    """One run. ``saved``: the SQLite file of the checkpoints, or a PostgreSQL address. ``person`` answers between rounds."""

    number: int
    role: Role
    workbench: Workbench
    client: LlmClient
    saved: Path | str
    person: Person | None = None
    say: Callable[[str], None] = lambda _: None


def run_agent(run: AgentLoopRun) -> tuple[Proposal | None, str]:
    """(the proposal or None, the reason why the run ended). After a kill, a call with the same number continues the run.

    Raises: TargetError; LlmError; SavedRunError; errors of the workbench's sandbox. After each of them the run can be continued.
    """
    from langgraph.types import Command

    with checkpoints.open_checkpointer(run.saved) as saver:
        graph = _Loop(run).graph().compile(checkpointer=saver)
        steps = 4 * (run.client.policy.exchanges + run.client.policy.rounds) + 20
        config: Any = {"configurable": {"thread_id": _thread(run.role.name, run.number)}, "recursion_limit": steps}
        known = graph.get_state(config)
        given: Any = None if known.values or known.next else {"rounds": 0}
        if known.values and known.next:
            run.say(Message("loop.continues", "  run {number} continues", number=run.number))
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
    return draft, Message.from_json(state.get("ended") or state.get("problem") or "")


def delete_run_checkpoints(saved: Path | str, agent: str, number: int) -> None:
    """Delete the checkpoints of a run that is over. Raises: SavedRunError."""
    if isinstance(saved, str) or saved.exists():
        with checkpoints.open_checkpointer(saved) as saver:
            saver.delete_thread(_thread(agent, number))


def _thread(agent: str, number: int) -> str:
    return f"{agent}-{number}-{FORMAT}"


class _Loop:
    """The graph's nodes, for one run."""

    def __init__(self, run: AgentLoopRun) -> None:
        self.run, self.role, self.policy = run, run.role, run.client.policy

    def graph(self) -> Any:
        from langgraph.graph import END, START, StateGraph

        made = StateGraph(AgentGraphState)  # type: ignore[type-var]
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

    def aim(self, state: AgentGraphState) -> AgentGraphState:
        """Ask the role what to do, and write the first messages."""
        aim = self.role.choose_task(self.policy.rounds)
        if isinstance(aim, str):
            return {"ended": messages_to_json(aim)}
        self.run.say(Message("loop.aim", "  {about}", about=aim.about))
        messages = [{"role": "system", "content": self.role.system}, {"role": "user", "content": aim.prompt}]
        started: AgentGraphState = {
            "exchanges": 0,
            "rounds": 0,
            "taken": False,
            "tried": False,
            "target": aim.target,
        }
        return {"about": str(aim.about), "facts": aim.facts, "messages": messages} | started

    def think(self, state: AgentGraphState) -> AgentGraphState:
        """One exchange with the model."""
        number = state["exchanges"] + 1
        reply = self.run.client.ask(
            f"{self.role.name}-{self.run.number}-{number:03d}", state["messages"], self.role.tools
        )
        return {"messages": [*state["messages"], reply.make_assistant_message()], "exchanges": number}

    def act(self, state: AgentGraphState) -> AgentGraphState:
        """Answer the tools that the model called. A call of ``propose`` is read and checked."""
        answers: list[ChatMessage] = []
        update: AgentGraphState = {"tried": False}
        for call in state["messages"][-1].get("tool_calls", []):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if name == DECLINE and DECLINE in self.tool_names:
                text, declined = self.decline(arguments, state)
                update |= declined if not update.get("taken") else {}  # type: ignore[typeddict-item]
            elif name != PROPOSE:
                text = self.role.answer_tool_call(state["facts"], name, arguments)
            elif update["tried"]:
                text = prompts.ONE_AT_A_TIME
            else:
                update |= self.judge(arguments, state)  # type: ignore[typeddict-item]
                left = self.policy.rounds - update["rounds"]
                problem = Message.from_json(update["problem"])
                text = prompts.TAKEN if update["taken"] else f"{problem}\n{prompts.AGAIN.format(left=left)}"
            answers.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        answers = answers or [{"role": "user", "content": prompts.CALL_A_TOOL}]
        update["messages"] = [*state["messages"], *answers]
        if not update.get("taken") and not update.get("ended"):
            update |= self.spent(update.get("rounds", state["rounds"]), state["exchanges"], update, state)  # type: ignore[typeddict-item]
        return update

    @property
    def tool_names(self) -> set[str]:
        return {tool["function"]["name"] for tool in self.role.tools}

    def decline(self, arguments: str, state: AgentGraphState) -> tuple[str, AgentGraphState]:
        """(the answer to a call of ``decline``, an update that ends the run if the reason can be read)."""
        try:
            reason = read_decline_reason(arguments)
        except DraftError as error:
            return str(error), {}
        ended = Message(
            "loop.declined",
            "the agent declined the target {target}: {reason}",
            target=state.get("target", ""),
            reason=reason,
        )
        return prompts.DECLINED, {"ended": messages_to_json(ended)}

    def judge(self, arguments: str, state: AgentGraphState) -> AgentGraphState:
        """Read and check a proposal. ``problem`` tells the model what to correct."""
        run, number = self.run, state["rounds"] + 1
        update: AgentGraphState = {"tried": True, "rounds": number, "taken": False}
        problem: str
        try:
            draft = self.role.make_proposal(state["facts"], arguments, _calls(TRY, state["messages"]))
        except DraftError as error:
            problem = Message("loop.unreadable_draft", "The proposal cannot be read: {problem}", problem=error.message)
        else:
            update["draft"] = _packed(draft)
            run.say(
                Message(
                    "loop.round",
                    "  round {number}: {title} (prediction: {gain})",
                    number=number,
                    title=draft.title,
                    gain=format_gain(draft.target, draft.predicted_gain),
                )
            )
            before = [a for a in run.workbench.list_earlier_proposals(draft.target) if a.patch_id == draft.patch_id]
            if any(attempt.outcome == "reject" for attempt in before):
                problem = Message("loop.rejected_before", "The gate rejected the same patch before.")
            else:
                problem = self.role.check_proposal(state["facts"], draft)
        result = fold_to_one_line(problem, 200) if problem else _passes()
        run.say(Message("loop.checked", "  round {number}: {result}", number=number, result=result))
        return update | {"problem": messages_to_json(problem), "taken": not problem}  # type: ignore[return-value]

    def spent(self, rounds: int, exchanges: int, update: AgentGraphState, state: AgentGraphState) -> AgentGraphState:
        """An update with the reason why the run ends now; empty if it goes on."""
        problem = str(Message.from_json(update.get("problem", state.get("problem", ""))))
        last = fold_to_one_line(problem, 300) if problem else Message("loop.no_proposal", "the model proposed nothing")
        if rounds >= self.policy.rounds:
            ended = Message(
                "loop.rounds_spent",
                "No proposal passed the quick check ({proposals:,|proposal|proposals} tried). The last result: {last}",
                proposals=rounds,
                last=last,
            )
            return {"ended": messages_to_json(ended)}
        if exchanges >= self.policy.exchanges:
            ended = Message(
                "loop.exchanges_spent",
                "No proposal passed the quick check in {exchanges:,|exchange|exchanges} with the model. The last result: "
                "{last}",
                exchanges=exchanges,
                last=last,
            )
            return {"ended": messages_to_json(ended)}
        return {}

    def after_act(self, state: AgentGraphState) -> str:
        from langgraph.graph import END

        if state.get("ended"):
            return str(END)
        return "steer" if state["tried"] else "think"

    def steer(self, state: AgentGraphState) -> AgentGraphState:
        """Ask the person whether to continue or stop, or for an instruction. Without a person, continue."""
        if self.run.person is None:
            return {"problem": state.get("problem", "")}
        from langgraph.types import interrupt

        answer = str(interrupt(_question(state))).strip()
        if answer.lower() in STOP:
            return {"ended": messages_to_json(Message("loop.stopped", "the person at the terminal stopped the run"))}
        if answer.lower() in GO:
            return {"problem": state.get("problem", "")}
        if state["rounds"] >= self.policy.rounds or state["exchanges"] >= self.policy.exchanges:
            self.run.say(
                Message(
                    "loop.nothing_left",
                    "  the run ends and ignores this instruction, because it has reached its limit of rounds or exchanges",
                )
            )
            return {"problem": state.get("problem", "")}
        text = prompts.STEER.format(text=shorten_text(answer, 4000))
        return {"messages": [*state["messages"], {"role": "user", "content": text}], "taken": False}


def _question(state: AgentGraphState) -> str:
    """The question that a person answers between rounds."""
    draft = state.get("draft")
    lines = [state["about"]]
    taken = bool(state.get("taken"))
    if draft:
        edits = ", ".join(fold_to_one_line(path, 100) for path, _ in draft["edits"])
        problem = Message.from_json(state.get("problem", ""))
        lines += [f"round {state['rounds']}: {draft['title']}", f"  {draft['hypothesis']}", f"  edits {edits}"]
        lines.append(f"  {_passes()}" if taken else f"  {shorten_text(problem, 1500)}")
    enter = Message("loop.send", "send the proposal to the gate") if taken else Message("loop.continue", "continue")
    return Message(
        "loop.question",
        "{about}\n[Enter: {enter}. 'stop': end the run. Any other text: an instruction for the model]",
        about="\n".join(lines),
        enter=enter,
    )


def _passes() -> Message:
    return Message("loop.passes", "the proposal passes the quick check")


def _calls(tool: str, messages: list[ChatMessage]) -> list[str]:
    """The arguments of all calls of a tool, oldest first."""
    calls = [call["function"] for message in messages for call in message.get("tool_calls", [])]
    return [str(call["arguments"]) for call in calls if call["name"] == tool]


def _packed(draft: Proposal) -> dict[str, Any]:
    return {**vars(draft), "edits": [[edit.path, edit.new_text] for edit in draft.edits]}


def _unpacked(raw: dict[str, Any]) -> Proposal:
    made = Proposal(**{**raw, "edits": ()})
    return replace(made, edits=tuple(Edit(path, text) for path, text in raw["edits"]))
