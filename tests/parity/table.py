"""Run the matrix of layouts and write docs/parity.md.

python tests/parity/table.py [--pairwise] [--out docs/parity.md]
"""

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

HEAD = """# Layouts against one process

Three steps of a tiny composition (vision, audio, LLM; packed; AdamW, three learning rates, clipping active,
fp32) on forked CPU ranks, against a plain loop over HF modules on one process. Loss (router loss included)
and gradient norm: largest relative difference over the steps. Weight: largest absolute difference after them.
Models: `dense` has 4 heads on 2 key-value heads; `uneven` 3 heads on 1, an odd MLP and a prime vocabulary;
`qwen3_moe` and `mixtral` 4 experts, 2 a token, the former with a dense layer and router loss.

| layout | model | ZeRO | tied | also | ranks | loss | norm | weight | seconds |
|---|---|---|---|---|---|---|---|---|---|
"""


def main() -> int:
    from parity.backbone import FULL, PAIRWISE, compare

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairwise", action="store_true", help="only the rows of `make test`")
    parser.add_argument("--out", default=str(ROOT / "docs" / "parity.md"))
    arguments = parser.parse_args()
    rows = PAIRWISE if arguments.pairwise else tuple(dict.fromkeys((*PAIRWISE, *FULL)))
    lines, failed = [], 0
    for row in rows:
        started = time.perf_counter()
        try:
            found = compare(row)
            cells = f"{found.loss:.1e} | {found.norm:.1e} | {found.weight:.1e}"
            failed += max(found.loss, found.norm, found.weight) >= 1e-5
        except AssertionError as error:
            cells, failed = "failed | | ", failed + 1
            print(error, flush=True)
        lines.append(
            f"| {row.degrees} | {row.llm} | {row.zero} | {'yes' if row.tied else ''} | "
            f"{'recomputed' if row.more else ''} | {row.world} | {cells} | "
            f"{time.perf_counter() - started:.0f} |"
        )
        print(lines[-1], flush=True)
        Path(arguments.out).write_text(HEAD + "\n".join(lines) + "\n")
    print(f"{len(rows)} rows, {failed} above 1e-5")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
