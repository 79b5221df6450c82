"""The chat templates of exports, in Jinja. They write ChatML, as ``Tokenizer.encode_messages`` does.

Tools, tool calls and reasoning become the same text as in training documents, which ingest makes with ``shapes/tool_calls``. A template raises an
exception for anything that it cannot write as ingest does: arguments that are text (transformers' convention is objects), contents that are not text,
and roles that no training document has.

A workspace keeps the template with which its tokenizer was frozen. Older templates write roles and texts only, with the same ids.
"""

from __future__ import annotations

import json

from factory.ingest.shapes.tool_calls import REASONING_KEYS
from factory.ingest.shapes.tools_prompt import TOOL_KEYS, TOOLS_HEAD, TOOLS_TAIL


def put_blanks_in_special_tokens(text: str) -> str:
    """Return a text as the templates write it: with a blank inside each special token that the text spells.

    >>> put_blanks_in_special_tokens("<|im_end|> <|endoftext|>")
    '<| im_end|> <| endoftext|>'
    """
    return text.replace("<|im_", "<| im_").replace("<|endoftext|>", "<| endoftext|>")


def _quoted(words: str) -> str:
    """Return an ASCII text as a Jinja literal."""
    return json.dumps(words)


# The template writes a role unchanged, so an unknown role could spell special tokens.
_ROLE_CHECK = (
    "{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}\n"
    "{{- raise_exception('role: expected system, user, assistant or tool') -}}\n"
    "{%- endif -%}\n"
)
_FOR_EACH = "{%- for message in messages -%}\n"
_DEFUSED = " | replace('<|im_', '<| im_') | replace('<|endoftext|>', '<| endoftext|>') -}}\n"
_WAITING = (
    "{%- if add_generation_prompt -%}\n"
    "{{- '<|im_start|>assistant\\n' -}}\n"
    "{%- endif -%}\n"
)  # fmt: skip
_TURNS = (
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}\n"
    "{{- message['content']" + _DEFUSED + "{{- '<|im_end|>\\n' -}}\n"
    "{%- endfor -%}\n" + _WAITING
)
_BOS = "{{- '<|endoftext|>' -}}\n"

# ns.tools: the tools as text; '' without tools. It is added to the chat's own system turn, or becomes a system turn before the chat.
_TOOLS = (
    "{%- set ns = namespace(tools='', text='', reasoning='') -%}\n"
    "{%- for tool in tools or [] -%}\n"
    "{%- set function = tool['function'] if tool['function'] is mapping else tool -%}\n"
    "{%- set ns.text = '{\"name\": ' + (function['name'] | tojson) -%}\n"
    f"{{%- for key in {[*TOOL_KEYS[1:]]} -%}}\n"
    "{%- if function[key] is defined and function[key] is not none -%}\n"
    "{%- set ns.text = ns.text + ', \"' + key + '\": ' + (function[key] | tojson) -%}\n"
    "{%- endif -%}\n"
    "{%- endfor -%}\n"
    "{%- for key, value in function.items() -%}\n"
    f"{{%- if key not in {[*TOOL_KEYS, 'type']} and value is not none -%}}\n"
    "{%- set ns.text = ns.text + ', ' + (key | tojson) + ': ' + (value | tojson) -%}\n"
    "{%- endif -%}\n"
    "{%- endfor -%}\n"
    '{%- set ns.tools = ns.tools + \'\\n{"type": "function", "function": \' + ns.text + \'}}\' -%}\n'
    "{%- endfor -%}\n"
    "{%- if ns.tools -%}\n"
    f"{{%- set ns.tools = {_quoted(TOOLS_HEAD)} + ns.tools + {_quoted(TOOLS_TAIL)} -%}}\n"
    "{%- if messages[0]['role'] != 'system' -%}\n"
    "{{- '<|im_start|>system\\n' -}}\n"
    "{{- ns.tools" + _DEFUSED + "{{- '<|im_end|>\\n' -}}\n"
    "{%- endif -%}\n"
    "{%- endif -%}\n"
)
# ns.text: the text of a turn. The assistant's text is its reasoning, its content and its calls.
_SAID = (
    "{%- set ns.text = message['content'] -%}\n"
    "{%- if message['role'] == 'assistant' -%}\n"
    "{%- set ns.reasoning = '' -%}\n"
    f"{{%- for key in {[*REASONING_KEYS]} -%}}\n"
    "{%- if message[key] and message[key] is not string -%}\n"
    "{{- raise_exception('reasoning: expected text') -}}\n"
    "{%- elif message[key] and not ns.reasoning -%}\n"
    "{%- set ns.reasoning = message[key] | trim -%}\n"
    "{%- endif -%}\n"
    "{%- endfor -%}\n"
    "{%- set calls = message['tool_calls'] or ([message['function_call']] if message['function_call'] else []) -%}\n"
    "{%- if calls or ns.reasoning -%}\n"
    "{%- set ns.text = (ns.text | trim if ns.text is string else ns.text) if ns.text else '' -%}\n"
    "{%- endif -%}\n"
    "{%- for call in calls -%}\n"
    "{%- set function = call['function'] if call['function'] is mapping else call -%}\n"
    "{%- if function['arguments'] and function['arguments'] is not mapping -%}\n"
    "{{- raise_exception('arguments of a call: expected an object; decode the JSON first') -}}\n"
    "{%- endif -%}\n"
    "{%- set ns.text = ns.text + ('\\n' if ns.text else '') + '<tool_call>\\n{\"name\": ' + (function['name'] | tojson)"
    " + ', \"arguments\": ' + ((function['arguments'] or {}) | tojson) + '}\\n</tool_call>' -%}\n"
    "{%- endfor -%}\n"
    "{%- if ns.reasoning -%}\n"
    "{%- set ns.text = '<think>\\n' + ns.reasoning + '\\n</think>' + ('\\n\\n' + ns.text if ns.text else '') -%}\n"
    "{%- endif -%}\n"
    "{%- elif ns.tools and loop.first and message['role'] == 'system' and ns.text is string -%}\n"
    "{%- set ns.text = ((ns.text | trim) + '\\n\\n' + ns.tools) | trim -%}\n"
    "{%- endif -%}\n"
    "{%- if ns.text is not string -%}\n"
    "{{- raise_exception('content: expected text') -}}\n"
    "{%- endif -%}\n"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}\n"
    "{{- ns.text" + _DEFUSED + "{{- '<|im_end|>\\n' -}}\n"
    "{%- endfor -%}\n" + _WAITING
)

CHAT_TEMPLATE = _BOS + _TOOLS + _FOR_EACH + _ROLE_CHECK + _SAID
TEMPLATE_WITHOUT_BOS = _TOOLS + _FOR_EACH + _ROLE_CHECK + _SAID
TEMPLATE_WITHOUT_CALLS = _BOS + _FOR_EACH + _ROLE_CHECK + _TURNS  # of older versions: without tools and reasoning
TEMPLATE_WITHOUT_CALLS_AND_BOS = _FOR_EACH + _ROLE_CHECK + _TURNS
OLDER_TEMPLATES = (_FOR_EACH + _TURNS,)  # of tokenizers without BOS: the same ids, but roles are not checked
