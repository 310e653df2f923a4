"""Files, by name, that cost a parser gigabytes or minutes. `fsdp-doctor check` refuses each."""

from __future__ import annotations

MB = 1 << 20
HOSTILE: dict[str, str] = {
    "lists.yaml": "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)),
    "merges.yaml": "a0: &a0 {k: 1}\n"
    + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}], k{i}: 1}}\n" for i in range(1, 40)),
    "text.yaml": f'a: &a "{"x" * MB}"\nb: [{",".join(["*a"] * 3000)}]\n',
    "nested.yaml": "a: " + "[" * 200_000,
    "itself.yaml": "a: &a [*a]\n",
    "chain.yaml": "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 5000)),
    "key.yaml": f"? {'k' * MB}\n: {{a: 1, b: 2}}\n",
    "keys.yaml": "".join(f"k{i}: 1\n" for i in range(90_000)),
    "lines.txt": "\n" * (4 * MB - 10) + "a",
    "dotted.toml": "a." * 200_000 + "b = 1\n",
    "dots.toml": ("a." * 300 + "b = 1\n") * 5000,
    "inline.toml": "a = " + "{a=" * 50_000,
    "nested.json": '{"a":' * 100_000,
    "variables.sh": "A0=xxxxxxxxxx\n" + "".join(f"A{i}=$A{i - 1}$A{i - 1}\n" for i in range(1, 60)),
    "used.sh": f"A0={'x' * 19_000}\n" + "torchrun t.py --fsdp $A0 $A0\n" * 60_000,
    "words.sh": "torchrun x.py " + "a.b.c=1 a.b=2 " * 200_000,
    "value.sh": "a.b=" + "x" * (4 * MB - 10),
    "assigned.sh": "A=" * (2 * MB - 10),
    "quotes.sh": "torchrun x.py " + '"' * (3 * MB),
    "dollars.sh": "torchrun " + "${" * MB,
    "ends.sh": "torchrun x;" * 380_000,
    "tildes.sh": "~a.b " * 800_000,
}
