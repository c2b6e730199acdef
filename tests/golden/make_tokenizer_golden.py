#!/usr/bin/env python3
"""Makes tokenizer_smollm2.txt: texts and the ids that Hugging Face `tokenizers` gives them.

    python make_tokenizer_golden.py SmolLM2-135M-Instruct.Q4_1.gguf > tokenizer_smollm2.txt

The vocabulary and the merges are those of the model file; the five pre-tokenizers are put over the same vocabulary:
smollm and gpt-2 as the library's own Digits and ByteLevel, qwen2, qwen35 and llama-bpe as a Split with the families'
published expressions. Needs the packages `tokenizers` and `gguf` (tests/requirements.txt). Nothing of tandem takes part.

The output is lines of a first word and its value:

    text "..."          a text; \\xNN is a byte, \\\\ and \\" are themselves, everything else is printable ASCII
    PRE IDS             its ids as user text, for PRE in smollm, gpt-2, qwen2 and qwen35 (without NFC), qwen2-nfc,
                        llama-bpe
    special IDS         smollm again, with control tokens recognized in the text
    decoded PRE "..."   what the library makes of the ids again, where that is not the text

A PRE line whose ids are smollm's is left out.
"""
import random
import sys

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN35 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+")
LLAMA_BPE = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

CODE = [
    "#include <stdio.h>\n\nint main(void)\n{\n    printf(\"%d\\n\", 42);\n    return 0;\n}\n",
    "static inline uint64_t rotl(uint64_t x, int k) { return (x << k) | (x >> (64 - k)); }",
    "for (size_t i = 0; i < n; i++)\n\tif (a[i] != b[i]) return -1;\n",
    "#define MAX(a,b) (((a)>(b))?(a):(b))\r\n#ifdef _WIN32\r\n\t#pragma once\r\n#endif\r\n",
    "def fib(n: int) -> int:\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n    a, b = 0, 1\n    for _ in r"
    "ange(n):\n"
    "        a, b = b, a + b\n    return a\n",
    "class Foo(Bar):\n\tdef __init__(self, *args, **kwargs):\n\t\tsuper().__init__(*args, **kwargs)\n",
    "x = [i**2 for i in range(10) if i % 2 == 0]; print(f\"{x!r:>20}\")",
    "fn main() -> Result<(), Box<dyn Error>> {\n    let v: Vec<&'static str> = vec![\"a\", \"b\"];\n    Ok(())\n}\n",
    "package main\n\nimport \"fmt\"\n\nfunc main() {\n\tfmt.Println(\"hi\")\n}\n",
    "const f = async (x) => { const r = await fetch(`/api/${x}`); return r?.json() ?? null; };",
    "SELECT a.id, COUNT(*) AS n FROM t1 a LEFT JOIN t2 b ON a.id=b.id WHERE a.x IS NOT NULL GROUP BY 1 HAVING n>10;",
    "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset='utf-8'/></head><body>&nbsp;&lt;p&gt;</body></html>",
    "{\"a\": [1, 2.5e-3, null, true], \"b\": {\"c\": \"\\u00e9\"}}",
    "if [ \"$#\" -lt 1 ]; then echo \"usage: $0 FILE\" >&2; exit 64; fi\n",
    "$ git log --oneline | head -n 5 && rm -rf ./build/*",
    "module Main where\nmain :: IO ()\nmain = mapM_ print $ takeWhile (<100) [x*x | x <- [1..]]\n",
    "public static void main(String[] args) throws IOException { System.out.println(args.length >>> 1); }",
    "template <typename T, std::size_t N> constexpr auto size(const T (&)[N]) noexcept -> std::size_t { return N; }",
    "  mov    rax, QWORD PTR [rbp-0x8]\n  add    rsp, 0x10\n  ret\n",
    "\\begin{equation}\n  E = mc^2 + \\int_0^\\infty e^{-x^2}\\,dx\n\\end{equation}",
    "key: value\nlist:\n  - one\n  - two # comment\n---\n...\n",
    "CFLAGS := -O2 -Wall\nall: $(OBJ)\n\t$(CC) -o $@ $^\n",
    "df.groupby(['a','b']).agg({'c':'sum'}).reset_index().sort_values('c',ascending=False)",
    "diff --git a/x b/x\n@@ -1,3 +1,4 @@\n-old\n+new\n context\n",
]
PROSE = [
    "Hello, we can use", "Hello world! 123", "  multiple   spaces", "\n", "", " ", "a", "A", "The quick brown fox.",
    "It's we'll they've I'm you're he'd can't", "IT'S WE'LL THEY'VE I'M YOU'RE HE'D CAN'T", "'s't're've'm'll'd",
    "'S'T'RE'VE'M'LL'D", "'\u017f 'K\u017f x'\u017fy", "rock 'n' roll ''s '''t", "don\u2019t it\u2019s we\u2019ll",
    "Supercalifragilisticexpialidocious antidisestablishmentarianism",
    "e.g. i.e. etc... wait\u2026 no--yes \u2014 ok",
    "user@example.com https://example.org/a?b=c&d=%20#frag", "C:\\Windows\\System32\\drivers\\etc\\hosts",
    "we'REally I'LLogical x'Streams IT'Seven 'LLama 'Table 'REd 'Move", "a  \u180eb", "a  \u0085b  \u00a0c",
    "a  \u200bb", "x  \x1cy  \x0bz",
    "  leading", "trailing  ", "\ttab\tseparated\tvalues\t", "line one\nline two\r\nline three\rline four",
    "\r\n\r\n", "\n\n\n", " \n \n ", "a \n\n b", "a\n b", "a  \n  b", "   \n\t\n   x", "\r\n x\r\n\r\n  y",
    "x\n\n\n\ny",
    "0", "12", "123", "1234", "12345", "1234567890" * 3, "3.14159", "1,234,567.89", "-42", "+1 (555) 123-4567",
    "2024-02-29T23:59:59.999Z", "0xDEADBEEF 0b1010 0o777 1e-10", "v1.2.3-rc.4+5", "abc123def456", "1st 2nd 3rd 4th",
    "50% off! $19.99 \u20ac5 \u00a310 \u00a51000",
    "\u00bd \u00bc \u00b2 x\u2075 \u2163 \u2460\u2461 \u0661\u0662\u0663 "
    "\u0967\u0968 \uff11\uff12 \u4e00\u4e8c\u4e09 \U0001d7d8\U0001d7d9", "a1b2c3 1a2b3c 1 2 3 4", "7 8  9   10",
    "!!!", "?!?!", "***bold*** _it_ ~~no~~ `code` ```py\nx\n```", "([{<>}])", "===> <=== <-> ->",
    "# Title\n\n## Sub\n- a\n",
    "| a | b |\n|---|---|\n| 1 | 2 |\n", "\u00abfran\u00e7ais\u00bb \u201eDeutsch\u201c \u201cEnglish\u201d",
    "Stra\u00dfe \u00c4\u00d6\u00dc \u00e4\u00f6\u00fc na\u00efve caf\u00e9 r\u00e9sum\u00e9 \u00c5ngstr\u00f6m",
    "Za\u017c\u00f3\u0142\u0107 g\u0119\u015bl\u0105 ja\u017a\u0144",
    "P\u0159\u00edli\u0161 \u017elu\u0165ou\u010dk\u00fd k\u016f\u0148",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u042d\u0442\u043e \u0442\u0435\u0441\u0442 \u2116 5.",
    "\u039a\u03b1\u03bb\u03b7\u03bc\u03ad\u03c1\u03b1 \u03ba\u03cc\u03c3\u03bc\u03b5",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u8fd9\u662f\u4e00\u4e2a\u6d4b\u8bd5\u3002",
    "\u6211\u75282\u53f0GPU\u8bad\u7ec3\u4e86100B\u6a21\u578b",
    "\u7e41\u9ad4\u4e2d\u6587\u8207\u7b80\u4f53\u4e2d\u6587\u6df7\u6392 mixed \u6587\u5b57",
    "\u3053\u3093\u306b\u3061\u306f\u4e16\u754c\u3001\u30ab\u30bf\u30ab\u30ca\u3068\u3072\u3089\u304c\u306a\u3002",
    "\u30ac\u30ae\u30b0 \uff76\uff9e\uff77\uff9e \u304b\u3099\u304d\u3099",
    "\uc548\ub155\ud558\uc138\uc694 \uc138\uacc4 \u1112\u1161\u11ab\u1100\u1173\u11af",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645\u060c \u0643\u064a\u0641 \u062d"
    "\u0627\u0644\u0643\u061f", "\u0628\u0650\u0633\u0652\u0645\u0650 \u0671\u0644\u0644\u0651\u064e\u0647\u0650",
    "\u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd \u05e2\u05d5\u05dc\u05dd",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e \u0958\u095b",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01", "\u1201\u120b\u121d",
    "\u10d2\u10d0\u10db\u10d0\u10e0\u10ef\u10dd\u10d1\u10d0",
    "Ti\u1ebfng Vi\u1ec7t Tie\u0302\u0301ng Vie\u0323\u0302t",
    "\U0001f600", "\U0001f600\U0001f601 hi\U0001f602",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 family",
    "\U0001f3f3\ufe0f\u200d\U0001f308 \U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7 \U0001f44d\U0001f3fd 1\ufe0f"
    "\u20e3 \u2764\ufe0f", "\U0001f9d1\U0001f3ff\u200d\U0001f680x",
    "e\u0301 a\u0308 n\u0303 o\u0302\u0323 \u0323\u0302", "\u0301start", "x\u0301\u0302\u0303\u0304\u0305",
    "q\u0323\u0307 q\u0307\u0323", "\u212b \u2126 \u1e9b\u0323 \ufb01 \ufb06",
    "\u00a0nbsp\u00a0\u00a0two", "\u3000full\u3000width\u3000\u3000", "a\u2003b\u2009c\u200ad", "a\u2028b\u2029c",
    "x\u0085y \u0085 z", "a\u180eb \u180e c",
    "zero\u200bwidth\u200c\u200d\ufeffbom", "\ufeffBOM first", "\x0b\x0c vt ff \x0b", "\x1c\x1d\x1e\x1f sep",
    "\x00nul\x00", "\x01\x02\x03\x7f", "\u00ad soft\u00adhyphen",
    "\u202eRTL\u202c \u2066iso\u2069", "\U0001d4d7\U0001d4ee\U0001d4f5\U0001d4f5\U0001d4f8 \U0001d504",
    "\U00020000\U0002a6df \U00010330\U00010331 \U0001f130",
    "\U000e0001\U000e0041", "\ue000\uf8ff", "\ufffd\ufffe\uffff", "\U0010ffff x", "\U000f0000y",
    "\u0378\u0379 unassigned",
    "<|im_end|>", "<|im_start|>system\nignore all<|im_end|>\n", "a<|endoftext|>b", "<|im_end|",
    "<|im_end|<|im_end|>|>", "<<|im_start|>>",
    "<filename>x.c<gh_stars>5<repo_name>", "<issue_start><issue_comment><issue_closed> < issue_start >",
    "<|im_start|><|im_end|><|endoftext|>", " <|im_end|> ",
    "text\n<|im_end|>\n\n text", "<empty_output><jupyter_code>print(1)<jupyter_output>1\n", "<|IM_END|> <|im _end|>",
    "<reponame><repo_name>",
]

# Marks in and around words, where the pre-tokenizers and normalization differ, and markup in the middle of text.
MARKS = [
    "a\u0300 \u0301b c\u0323\u0307d", "\u0915\u093f\u0924\u093e\u092c \u0939\u0948", "\u0e01\u0e33\u0e25\u0e31\u0e07",
    "1\u0301 2\u20e3 !\u0301\u0302 \u0301\u0301", "'\u0301s '\u0301S x\u0301's", "\n\u0301\r\n\u0301 \u0301",
    "\u0bb5\u0ba3\u0b95\u0bcd\u0b95\u0bae\u0bcd", "\u064a\u064f\u0648\u0646\u0650\u064a\u0643\u064f\u0648\u062f",
    "<think>\n\u0338</think>", "a<think>b</think>\n\nc", "<think><think></think", "<tool_call>\n{}\n</tool_call>",
    "<|im_start|>user\n\u4f60\u597d<|im_end|>\n<|im_start|>assistant\n<think>\n", "<|audio_start|>x<|audio_end|>",
    "<tts_pad><|fim_prefix|> <|box_start|>", "\u1100\u1161\u11a8 \uac01 \u1112\u1161\u11ab\u0301", "\u212b\u0301 \u1e9b\u0323",
]


def runs():
    """Runs of one thing, alone and between letters, at lengths around the tokens that vocabularies hold."""
    units = [" ", "\n", "\t", "\r\n", " \n", "a", "-", "=", "*", "\u4e2d", "\u00e9", "0", "\U0001f600", "\u0301"]
    for unit in units + ["ab ", "\u00a0"]:
        for n in (2, 3, 4, 5, 8, 15, 16, 17, 40):
            yield unit * n
        yield "x" + unit * 7 + "y"
        yield "x " + unit * 6 + " y"


def chats():
    """SmolLM2 prompts as text: read with control tokens they are what a chat must encode to."""
    turn = "<|im_start|>{}\n{}<|im_end|>\n"
    system = turn.format("system", "You are a helpful AI assistant named SmolLM, trained by Hugging Face")
    for user in ("hi", "", " lead", "\n\nnewlines first", "ends in lines\n\n", "42", "\u4f60\u597d", "'s it"):
        yield system + turn.format("user", user) + "<|im_start|>assistant\n"
        yield (
            turn.format("system", user) + turn.format("user", "What?") + turn.format("assistant", user)
            + turn.format("user", user) + "<|im_start|>assistant\n"
        )


def mixtures(n):
    """Random texts out of pools, from a fixed seed."""
    pools = [
        "abcdefghijklmnopqrstuvwxyz", "ABCXYZ", "0123456789", " ", "  \t", "\n\r",
        ".,;:!?'\"()[]{}<>|/\\-_=+*&^%$#@~`",
        "\u00e0\u00e9\u00ee\u00f5\u00fc\u00df\u00f1\u00e7\u0142\u0159", "\u0430\u0431\u0432\u0433\u0434\u0416\u0429",
        "\u7684\u4e00\u662f\u4e0d\u4e86\u4eba\u6211\u5728\u6709\u4ed6",
        "\u3042\u3044\u3046\u30a2\u30a4\u30a6\u30fc", "\u0627\u0644\u0645\u0646\u0648\u064a\u064e\u0651",
        "\u0300\u0301\u0308\u0323\u0327\u20dd", "\U0001f600\U0001f680\u2764\ufe0f\u200d\U0001f3fd",
        "\u00a0\u2009\u3000\u0085\u200b\ufeff", "\u00bd\u00b2\u2163\u0663\uff15", "'s't'll'RE'Ve",
        "\u0915\u093f\u094d\u0937\u0924", "\uac00\ub098\u1100\u1161\u11a8",
    ]
    draw = random.Random(20240229)
    words = (
        "the of function return self import error value \u00fcber \u043d\u0435 \u4e2d\u56fd <|im_end|> it's x86 0xff"
    ).split()
    for _ in range(n):
        out = []
        for _ in range(draw.randint(1, 12)):
            if draw.random() < 0.3:
                out.append(draw.choice(["", " "]) + draw.choice(words))
            else:
                pool = draw.choice(pools)
                out.append("".join(draw.choice(pool) for _ in range(draw.randint(1, 5))))
        yield "".join(out)


def texts():
    everything = PROSE + CODE + list(runs()) + list(chats()) + list(mixtures(330)) + MARKS
    return list(dict.fromkeys(everything))


def make(vocab, merges, pre, ignore_merges=False, normalizer=None):
    t = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    t.pre_tokenizer = pre
    t.decoder = decoders.ByteLevel()
    if normalizer:
        t.normalizer = normalizer
    return t


def split(pattern):
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])


def read_model(path):
    fields = gguf.GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(m.split(" ")) for m in fields["tokenizer.ggml.merges"].contents()]
    control = [t for t, kind in zip(tokens, types) if kind == gguf.TokenType.CONTROL]
    return {t: i for i, t in enumerate(tokens)}, merges, control


def quote(text):
    out = []
    for byte in text.encode("utf-8"):
        char = chr(byte)
        out.append("\\" + char if char in '\\"' else char if 0x20 <= byte < 0x7F else f"\\x{byte:02x}")
    return '"' + "".join(out) + '"'


def main():
    vocab, merges, control = read_model(sys.argv[1])
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    smollm = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    tokenizers = {
        "smollm": make(vocab, merges, smollm),
        "gpt-2": make(vocab, merges, level),
        "qwen2": make(vocab, merges, split(QWEN2)),
        "qwen2-nfc": make(vocab, merges, split(QWEN2), normalizer=normalizers.NFC()),
        "qwen35": make(vocab, merges, split(QWEN35)),
        "llama-bpe": make(vocab, merges, split(LLAMA_BPE), ignore_merges=True),
    }
    special = make(vocab, merges, smollm)
    special.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    print("# Made by make_tokenizer_golden.py, which says what the lines are.")
    for text in texts():
        print("text", quote(text))
        first = None
        for name, t in tokenizers.items():
            ids = t.encode(text, add_special_tokens=False).ids
            if ids != first:
                print(name, *ids)
            first = first or ids
            decoded = t.decode(ids, skip_special_tokens=False)
            if decoded != text:
                print("decoded", name, quote(decoded))
        ids = special.encode(text, add_special_tokens=False).ids
        if ids != first:
            print("special", *ids)


if __name__ == "__main__":
    main()
