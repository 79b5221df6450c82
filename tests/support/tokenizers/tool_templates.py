"""Chat templates that take tools, calls and reasoning as objects, in the form of public families and in words of our own.

``GENERATION`` in a template stands where the tag of transformers begins what the assistant writes, and ``END`` where it ends.
"""

from __future__ import annotations

from tests.support.tokenizers.families import CHATML

# As Qwen3: reasoning only after the last question, read out of the content too; results in a turn of the user.
QWEN3 = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n\nFunctions that may be called, one a line:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nWrite a call between <tool_call> and </tool_call>.<|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, question=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}
        {%- set ns.question = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\n') %}
            {%- endif %}
        {%- endif %}
        {%- set thinks = loop.index0 > ns.question and (loop.last or reasoning) %}
        {%- set plain = not reasoning and not message.tool_calls and '</think>' not in message.content %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {%- if plain and thinks %}
            {{- '<think>\n\n</think>\n\n' }}
        {%- endif %}
        GENERATION
        {%- if thinks and not plain %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- elif thinks %}
            {{- content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>' }}
        END
        {{- '\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""  # noqa: E501

# As Llama 3.1: tools in the first question, one call an answer, results as JSON of the role ipython, a date.
LLAMA31 = r"""
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\n" }}
{%- endif %}
{{- "Known until: 2023\nToday: " + date_string + "\n\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if tools is not none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content'] | trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("There is no first question for the tools") }}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\nAnswer with a call of one of these functions, as JSON.\n\n' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
    {{- first_user_message + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {%- if message.role == 'assistant' %}
            GENERATION
            {{- message['content'] | trim + '<|eot_id|>' }}
            END
        {%- else %}
            {{- message['content'] | trim + '<|eot_id|>' }}
        {%- endif %}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model makes one call at a time") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        GENERATION
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
        END
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

# As SmolLM3: a switch in the system message, reasoning of every answer, results as the user's text.
SMOLLM3 = r"""
{%- if messages[0]["role"] == "system" -%}
    {%- set system_message = messages[0]["content"] -%}
    {%- set thinking = "/no_think" not in system_message -%}
{%- else -%}
    {%- set system_message = "" -%}
    {%- set thinking = true -%}
{%- endif -%}
{{- "<|im_start|>system\n## Facts\n\nToday: " -}}
{{- strftime_now("%d %B %Y") -}}
{{- "\nReasoning: " + ("on" if thinking else "off") + "\n\n" -}}
{{- system_message.replace("/no_think", "").rstrip() -}}
{%- if tools -%}
    {{- "\n\n### Tools\n\nSignatures between <tools> and </tools>:\n<tools>\n" -}}
    {%- for tool in tools -%}
        {{- (tool | string) + "\n" -}}
    {%- endfor -%}
    {{- "</tools>" -}}
{%- endif -%}
{{- "<|im_end|>\n" -}}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else "" -%}
    {%- if message.role == "user" -%}
        {{- "<|im_start|>user\n" + content + "<|im_end|>\n" -}}
    {%- elif message.role == "assistant" -%}
        {{- "<|im_start|>assistant\n" -}}
        GENERATION
        {%- if message.reasoning_content -%}
            {{- "<think>\n" + message.reasoning_content + "\n</think>\n" -}}
        {%- endif -%}
        {{- content -}}
        {%- for call in message.tool_calls or [] -%}
            {{- "\n<tool_call>" + {"name": call.function.name, "arguments": call.function.arguments} | tojson + "</tool_call>" -}}
        {%- endfor -%}
        {{- "<|im_end|>" -}}
        END
        {{- "\n" -}}
    {%- elif message.role == "tool" -%}
        {{- "<|im_start|>user\n" + content + "<|im_end|>\n" -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|im_start|>assistant\n" -}}
{%- endif -%}
"""

# As Hermes 2 Pro: plain ChatML, and a template of the name 'tool_use' with macros for chats with tools.
HERMES = r"""
{%- macro describe(spec) %}
    {%- if spec.type == "array" %}
        {{- "list[" + describe(spec["items"]) + "]" }}
    {%- elif spec.type is string %}
        {{- {"string": "str", "number": "float", "integer": "int", "boolean": "bool", "object": "dict"}[spec.type] }}
    {%- else %}
        {{- "Any" }}
    {%- endif %}
{%- endmacro %}
{{- "<|im_start|>system\nYou call functions. <tools> " }}
{%- for tool in tools %}
    {%- set tool = tool.function if tool.function is defined else tool %}
    {{- tool.name + "(" }}
    {%- for name, spec in tool.parameters.properties.items() %}
        {{- name + ": " + describe(spec) }}
        {%- if not loop.last %}
            {{- ", " }}
        {%- endif %}
    {%- endfor %}
    {{- ") - " + (tool.description or "") + "\n" }}
{%- endfor %}
{{- "</tools>" }}
{%- if messages[0].role == "system" %}
    {{- "\n" + messages[0].content }}
{%- endif %}
{{- "<|im_end|>\n" }}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "assistant" and message.tool_calls is not defined) %}
        {{- "<|im_start|>" + message.role + "\n" }}
        {%- if message.role == "assistant" %}
            GENERATION
            {{- message.content + "<|im_end|>" }}
            END
        {%- else %}
            {{- message.content + "<|im_end|>" }}
        {%- endif %}
        {{- "\n" }}
    {%- elif message.role == "assistant" %}
        {{- "<|im_start|>" + message.role + "\n" }}
        GENERATION
        {%- for call in message.tool_calls %}
            {{- "<tool_call>\n" + {"arguments": call.function.arguments, "name": call.function.name} | tojson + "\n</tool_call>" }}
            {%- if not loop.last %}
                {{- "\n" }}
            {%- endif %}
        {%- endfor %}
        {{- "<|im_end|>" }}
        END
        {{- "\n" }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}
            {{- "<|im_start|>tool\n" }}
        {%- endif %}
        {{- "<tool_response>\n" + message.content }}
        {{- "\n</tool_response>" if loop.last else "\n</tool_response>\n" }}
        {%- if not loop.last and loop.nextitem.role != "tool" or loop.last %}
            {{- "<|im_end|>" }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\n" }}
{%- endif %}
"""

_TAGS = ("GENERATION", "{%- generation %}"), ("END", "{%- endgeneration %}")
_STYLES = {"qwen3": QWEN3, "llama3.1": LLAMA31, "smollm3": SMOLLM3, "hermes": HERMES}


def make_template(name: str, tagged: bool) -> str:
    """A template with the tag around what the assistant writes, or without it."""
    text = _STYLES[name].lstrip("\n").removesuffix("\n")
    for mark, tag in _TAGS:
        text = "\n".join(
            line.replace(mark, tag) if line.strip() == mark and tagged else line
            for line in text.split("\n")
            if tagged or line.strip() != mark
        )
    return text


# The family whose tokenizer each style uses, and what its template takes as objects.
STYLES = {
    "qwen3": ("qwen2.5", {"tools", "calls", "reasoning"}),
    "llama3.1": ("llama3", {"tools", "calls"}),
    "smollm3": ("smollm2", {"tools", "calls", "reasoning"}),
    "hermes": ("smollm2", {"tools", "calls"}),
}
PLAIN_OF_HERMES = CHATML
