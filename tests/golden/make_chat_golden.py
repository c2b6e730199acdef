#!/usr/bin/env python3
"""Makes chat_golden.json: conversations, and the prompts that the published templates render of them.

    python make_chat_golden.py QWEN3.5.jinja QWEN3.6.jinja QWEN3.8.jinja > chat_golden.json

The arguments are the files chat_template.jinja of the three model families; they are recognized by their digests and are
not part of the tree. The environment is the one that `transformers` makes: jinja2's sandbox, blocks trimmed, an exception
for the template to raise. Needs the package jinja2. Nothing of tandem takes part.

Each case names the format that must give the same prompt ("qwen3.5" for 3.5 and 3.6), what the request says, the messages,
and the prompt, or null where the template raises an exception.
"""
import hashlib
import itertools
import json
import sys

from jinja2.exceptions import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATES = {
    "a4aee8afcf2e0711942cf848899be66016f8d14a889ff9ede07bca099c28f715": ("3.5", "qwen3.5"),
    "e84f32a23fdda27689f868aa4a1a5621f41133e51a48d7f3efcbea2839574259": ("3.6", "qwen3.5"),
    "c3cf9e34abf4f9e36c2d72165aa9c132d3e2a725b6c2586aaa3a8af9d7a81041": ("3.8", "qwen3.8"),
}


def system(text):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, reasoning=None):
    return {"role": "assistant", "content": text} | ({} if reasoning is None else {"reasoning_content": reasoning})


TOOL = "<tool_response>\n42\n</tool_response>"
CONVERSATIONS = [
    [user("hi")],
    [user("\u4f60\u597d\uff0c\u7b80\u5355\u4ecb\u7ecd\u4e00\u4e0b\u4f60\u81ea\u5df1\u3002")],
    [user("")],
    [user("  lead\n")],
    [user("\u3000\u00a0\u2003wide\u2028\u0085")],
    [user("\u200bno space\u200b\ufeff")],
    [user("\x1c\x1f control spaces \x1d\n")],
    [user("lines\n\ninside  and\ttabs\n")],
    [user("say <|im_end|> and <think>")],
    [system("Be brief."), user("hi")],
    [system(""), user("hi")],
    [system(" \n\t "), user("hi")],
    [system("\n Trim me.\u3000\n"), user("hi")],
    [system("a\n\nb"), user("x"), assistant("y"), user("z")],
    [user("a"), assistant("b"), user("c")],
    [user("a"), assistant("b", "because"), user("c")],
    [user("a"), assistant(" b \n", "\n because \n"), user("c")],
    [user("a"), assistant("b", ""), user("c")],
    [user("a"), assistant("", "only thought"), user("c")],
    [user("a"), assistant("b", "r1"), user("c"), assistant("d", "r2"), user("e")],
    [user("a"), assistant("b", "r1"), user("c"), assistant("d", "r2")],
    [user("a"), assistant("b"), assistant("c", "r"), user("d")],
    [assistant("first", "r"), user("a")],
    [user("a"), user("b")],
    [user("a"), assistant("<think>\nwhy\n</think>\n\nb"), user("c")],
    [user("a"), assistant("why\n</think>\n\nb"), user("c")],
    [user("a"), assistant("<think>\n\n</think>\n\nb"), user("c")],
    [user("a"), assistant("x<think>y<think>z</think>u</think>\n\n\n v"), user("c")],
    [user("a"), assistant("<think>never ends"), user("c")],
    [user("a"), assistant("b</think>"), user("c")],
    [user("a"), assistant("</think><think>b"), user("c")],
    [user("a"), assistant("<think>in text</think>b", "apart"), user("c")],
    [user("a"), assistant("<think>in text</think>b", ""), user("c")],
    [user("a"), assistant("<think>\u3000wide\u00a0</think>\n b\u2003"), user("c")],
    [user("a"), assistant("<think>\nwhy\n</think>\n\nb")],
    [user("a"), assistant("call", "r1"), user(TOOL), assistant("b", "r2"), user(TOOL)],
    [user("a"), assistant("call", "r1"), user(f" {TOOL}\n"), assistant("b")],
    [user("a"), assistant("call", "r1"), user(TOOL + " and?"), assistant("b", "r2")],
    [user("a"), assistant("call", "r1"), user("<tool_response>"), assistant("b", "r2")],
    [user("<tool_response></tool_response>"), assistant("b", "r"), user("c"), assistant("d", "r")],
    [system("s"), user("a"), assistant("b", "r"), user("c"), assistant("d"), user("e"), assistant("f", "q"), user("g")],
    # what templates refuse
    [system("only")],
    [system("s"), assistant("b")],
    [user(TOOL)],
    [user("a"), system("late"), user("b")],
    [system("a"), system("b"), user("c")],
]
REQUESTS = {
    "3.5": [{}, {"enable_thinking": True}, {"enable_thinking": False}],
    "3.6": [{}, {"preserve_thinking": True}, {"preserve_thinking": False, "enable_thinking": False}],
    "3.8": [{}, {"enable_thinking": False}, {"reasoning_effort": "low"}, {"reasoning_effort": "medium"},
            {"preserve_thinking": False, "reasoning_effort": "medium"},
            {"enable_thinking": True, "preserve_thinking": True, "reasoning_effort": "xhigh"},
            {"enable_thinking": False, "preserve_thinking": False, "reasoning_effort": "low"}],
}


def refuse(message):
    raise TemplateError(message)


def compile_template(text):
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    env.globals["raise_exception"] = refuse
    env.filters["tojson"] = lambda x: json.dumps(x, ensure_ascii=False)
    return env.from_string(text)


def main():
    cases = []
    for path in sys.argv[1:]:
        text = open(path, encoding="utf-8", newline="").read().removesuffix("\n")
        family, name = TEMPLATES[hashlib.sha256(text.encode()).hexdigest()]
        template = compile_template(text)
        # The first conversations with every request; the others, of which there are many, with one after the other.
        turns = itertools.cycle(REQUESTS[family])
        for index, messages in enumerate(CONVERSATIONS):
            many = index in (0, 9, 10, 19, 20, 24, 35)
            for request in REQUESTS[family] if many else [next(turns), next(turns)]:
                try:
                    prompt = template.render(messages=messages, add_generation_prompt=True, **request)
                except TemplateError:
                    prompt = None
                cases.append({"family": family, "format": name, "request": request, "messages": messages, "prompt": prompt})
    print("[")
    print(",\n".join(json.dumps(case, ensure_ascii=True, separators=(",", ":")) for case in cases))
    print("]")


if __name__ == "__main__":
    main()
