"""Chat templates in the shapes of published ones, in short: roles, thinking, calls, and what tools say."""

# ruff: noqa: E501

END = "{% if add_generation_prompt %}"
CHATML = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"

QWEN_TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ messages[0].content + '\n\n' if messages[0].role == 'system' }}# Tools\n\n"
    "You may call one or more functions to assist with the user query.\n{{ tools | tojson }}<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
)
QWEN_LATER = (
    "{% for c in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% elif not loop.first or m.role != 'system' %}" + CHATML + "{% endif %}{% endfor %}" + END
)
QWEN25 = (
    QWEN_TOOLS + "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}"
    f"{QWEN_LATER}<|im_start|>assistant\n{{% endif %}}"
)
QWEN3 = (
    QWEN_TOOLS + "{% for m in messages %}{% if m.role == 'assistant' %}{% set said = m.content.split('</think>')[-1] %}"
    "{% set hm = m.reasoning_content or m.content.split('</think>')[0].split('<think>')[-1] %}<|im_start|>assistant\n"
    "{% if loop.last %}<think>\n{{ hm.strip() if m.reasoning_content or '</think>' in m.content }}\n</think>\n\n"
    "{% endif %}{{ said.lstrip('\n') }}"
    f"{QWEN_LATER}<|im_start|>assistant\n{{% endif %}}"
)
LLAMA31 = (  # calls have no content; what a tool says is JSON
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}<|eot_id|>"
    "{% for m in messages %}{% if m.tool_calls %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "<|eot_id|>{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
    "{% elif m.role != 'system' %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.role == 'user' and tools and loop.index0 < 2 %}Given these functions, call one.\n{{ tools | tojson(indent=4) }}\n"
    "{% endif %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
)
MISTRAL = (  # the system message stands before the last one of the user
    "{% set last = messages | selectattr('role', 'equalto', 'user') | list | length %}{% set ns = namespace(n=0) %}<s>"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.n = ns.n + 1 %}[INST] "
    "{% if ns.n == last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}{{ m.content }}[/INST]"
    '{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}'
    "{{ ', ' if not loop.last }}{% endfor %}]</s>{% elif m.role == 'tool' %}[TOOL_RESULTS] "
    '{"content": {{ m.content }}, "call_id": "x"}[/TOOL_RESULTS]'
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}</s>{% endif %}{% endfor %}"
)
GEMMA3 = (
    "<bos>{% for m in messages %}{% if m.role != 'system' %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ messages[0].content + '\n\n' if loop.index0 == 1 and messages[0].role == 'system' }}{{ m.content | trim }}"
    "<end_of_turn>\n{% endif %}{% endfor %}"
)
GEMMA4 = (  # results follow their call, the content comes last, and arguments are sorted
    "{% macro value(x) %}{% if x is string %}<|\"|>{{ x }}<|\"|>{% elif x is boolean %}{{ 'true' if x else 'false' }}"
    "{% elif x is mapping %}{{ '{' }}{% for k, v in x | dictsort %}{{ k }}:{{ value(v) }}{{ ',' if not loop.last }}"
    "{% endfor %}{{ '}' }}{% elif x is iterable %}[{% for v in x %}{{ value(v) }}{{ ',' if not loop.last }}{% endfor %}]"
    "{% else %}{{ x }}{% endif %}{% endmacro %}<bos>{% for m in messages %}{% if m.role != 'tool' %}"
    "<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<|channel>thought\n{{ m.reasoning_content }}\n<channel|>{% endif %}"
    "{% set first = loop.index0 %}{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}"
    "{{ value(c.function.arguments) }}<tool_call|>{% if messages[first + loop.index] is defined and "
    "messages[first + loop.index].role == 'tool' %}<|tool_response>response:{{ c.function.name }}{value:"
    "{{ value(messages[first + loop.index].content) }}}<tool_response|>{% endif %}{% endfor %}"
    "{{ m.content.split('<channel|>')[-1] | trim }}<turn|>\n{% endif %}{% endfor %}"
)
DEEPSEEK_CALL = (
    "<｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>{{ c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}"
    "<｜tool▁call▁end｜>"
)
DEEPSEEK_V3 = (  # system messages come first, and arguments are text
    "<｜begin▁of▁sentence｜>{% for m in messages if m.role == 'system' %}{{ m.content }}\n\n{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.role == 'assistant' %}<｜Assistant｜>"
    "{{ m.content }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}"
    + DEEPSEEK_CALL
    + "{% endfor %}"
    "<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>{% elif m.role == 'tool' %}<｜tool▁outputs▁begin｜>"
    "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜><｜tool▁outputs▁end｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
DEEPSEEK_R1 = DEEPSEEK_V3.replace("{{ m.content }}{% if m.tool", "{{ m.content.split('</think>')[-1] }}{% if m.tool")
GLM45 = (  # arguments that are no text are JSON
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}{% elif m.role == 'assistant' %}"
    "<|assistant|>\n<think>{{ m.reasoning_content.strip() if loop.last and m.reasoning_content }}</think>"
    "{{ '\n' + m.content.strip() if m.content.strip() }}{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}\n"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
    "{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}{% elif m.role == 'tool' %}"
    "<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>{% else %}<|system|>\n{{ m.content }}{% endif %}"
    "{% endfor %}"
)
GPT_OSS = (  # what a tool says is JSON
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nReasoning: medium<|end|>"
    "{% for m in messages %}{% if m.role == 'system' %}<|start|>developer<|message|># Instructions\n\n{{ m.content }}<|end|>"
    "{% elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% elif m.role == 'assistant' %}"
    "{% if m.thinking and loop.last %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% if m.tool_calls %}{% if m.content %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% for c in m.tool_calls %}<|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>"
    "{{ c.function.arguments | tojson }}<|call|>{% endfor %}{% else %}<|start|>assistant<|channel|>final<|message|>"
    "{{ m.content }}<|end|>{% endif %}{% else %}<|start|>functions.x to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>{% endif %}{% endfor %}"
)
PHI4 = "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}"
COHERE = (  # the content of a message with calls is a plan; results have their own quotes
    "<BOS_TOKEN>{% for m in messages %}{% if m.role == 'system' %}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|># System Preamble\n"
    "You are in contextual safety mode.\n\n{{ m.content }}<|END_OF_TURN_TOKEN|>{% elif m.role == 'tool' %}"
    '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>[\n    {\n        "tool_call_id": "{{ loop.index0 }}",\n'
    '        "results": {\n            "0": {{ m.content | tojson }}\n        },\n        "is_error": null\n    }\n]'
    "<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>{% elif m.role == 'user' %}<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{{ m.content }}"
    "<|END_OF_TURN_TOKEN|>{% else %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% if m.tool_calls %}"
    "{{ '<|START_THINKING|>' + m.content + '<|END_THINKING|>' if m.content }}<|START_ACTION|>[{% for c in m.tool_calls %}\n"
    '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.function.name }}", "parameters": '
    "{{ c.function.arguments | tojson }}}{{ ',' if not loop.last }}{% endfor %}\n]<|END_ACTION|>{% else %}<|START_RESPONSE|>"
    "{{ m.content }}<|END_RESPONSE|>{% endif %}<|END_OF_TURN_TOKEN|>{% endif %}{% endfor %}"
)
SMOLLM3 = (
    "{% set said = messages[0].content if messages[0].role == 'system' else '' %}<|im_start|>system\n## Metadata\n\n"
    "Knowledge Cutoff Date: June 2025\nReasoning Mode: {{ '/no_think' if '/no_think' in said else '/think' }}\n\n"
    "## Custom Instructions\n\n{{ said.replace('/no_think', '').replace('/think', '').rstrip() }}\n\n<|im_end|>\n"
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n{% elif m.role == 'assistant' %}"
    "<|im_start|>assistant\n{{ '<think>\n\n</think>\n' if '/no_think' in said }}{{ m.content.lstrip('\n') }}<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)
KIMI_K2 = (  # the id of a call has its name
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_system|>system<|im_middle|>You are Kimi, an AI "
    "assistant created by Moonshot AI.<|im_end|>{% endif %}{% if m.role == 'system' %}<|im_system|>system<|im_middle|>"
    "{{ m.content }}{% elif m.role == 'tool' %}<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}\n{{ m.content }}"
    "{% else %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}{% if m.tool_calls %}<|tool_calls_section_begin|>"
    "{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}"
    "<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}{% endif %}<|im_end|>{% endfor %}"
)
MINIMAX_M2 = (
    "]~!b[{% for m in messages %}{% if m.role == 'assistant' %}]~b]ai\n{% if m.reasoning_content and loop.last %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}{% if m.tool_calls %}\n<minimax:tool_call>\n"
    '{% for c in m.tool_calls %}<invoke name="{{ c.function.name }}">\n{% for k, v in c.function.arguments.items() %}'
    '<parameter name="{{ k }}">{{ v | tojson if v is not string else v }}</parameter>\n{% endfor %}</invoke>\n{% endfor %}'
    "</minimax:tool_call>{% endif %}{% elif m.role == 'tool' %}]~b]tool\n<response>{{ m.content }}</response>{% else %}"
    "]~b]{{ m.role }}\n{{ m.content }}{% endif %}[e~[\n{% endfor %}"
)

# template -> the field of thinking that it reads, the number of calls that it takes in a message, and whether a message
# with calls may have content
PUBLISHED = {
    "Qwen2.5": (QWEN25, "", 2, True),
    "Qwen3": (QWEN3, "reasoning_content", 2, True),
    "Llama 3.1": (LLAMA31, "", 1, False),
    "Mistral 7B v0.3": (MISTRAL, "", 2, False),
    "Gemma 3": (GEMMA3, "", 0, False),
    "Gemma 4": (GEMMA4, "reasoning_content", 2, True),
    "DeepSeek-V3-0324": (DEEPSEEK_V3, "", 2, True),
    "DeepSeek-R1-0528": (DEEPSEEK_R1, "", 2, True),
    "GLM-4.5": (GLM45, "reasoning_content", 2, True),
    "gpt-oss": (GPT_OSS, "thinking", 2, True),
    "Phi-4": (PHI4, "", 0, False),
    "Command R7B": (COHERE, "", 2, True),
    "SmolLM3": (SMOLLM3, "", 0, False),
    "Kimi K2": (KIMI_K2, "", 2, True),
    "MiniMax-M2": (MINIMAX_M2, "reasoning_content", 2, True),
}
