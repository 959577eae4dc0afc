"""Train a multimodal LLM: ``deepspeed run.py --deepspeed_config ds_configs/omni.json``.

Also started by torchrun and srun. ``--plan`` and ``--inspect`` print what would run and exit.
"""

import argparse
import os
import sys
import traceback

from omni_ds.errors import UserError


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a multimodal LLM with encoders woven into the LLM's pipeline.",
        epilog="Every key of the configuration is described in docs/config.md.",
    )
    parser.add_argument(
        "--deepspeed_config", "--config", required=True, metavar="JSON", help="configuration file"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the configuration, for example --set pipeline.stages=4 (repeatable)",
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="CHECKPOINT",
        help="continue from the latest checkpoint in omni.output_dir, or from the one named",
    )
    parser.add_argument("--export", metavar="DIR", help="write the model as an HF folder to DIR at the end")
    parser.add_argument(
        "--eval_only", action="store_true", help="evaluate (and export, with --export) without training"
    )
    parser.add_argument(
        "--trace",
        metavar="STEPS",
        help="write a timeline of step STEPS, or of FIRST:LAST, to omni.output_dir/trace.json",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="print the plan of one step, draw it for several mixes of modalities, and exit; needs no ranks",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="folder of plan.png and plan.json (with --plan; omni.output_dir without it)",
    )
    parser.add_argument(
        "--world_size", type=int, metavar="N", help="number of ranks to plan for (with --plan)"
    )
    parser.add_argument(
        "--inspect", type=int, metavar="N", help="print N samples as the model sees them and exit"
    )
    parser.add_argument("--local_rank", type=int, default=None, help=argparse.SUPPRESS)  # set by launchers
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = parse_arguments(argv)
    try:
        if arguments.plan or arguments.inspect is not None:
            from omni_ds.offline import inspect_samples, print_plan

            return print_plan(arguments) if arguments.plan else inspect_samples(arguments)
        from omni_ds.engine.environment import prepare_imports

        prepare_imports()
        from omni_ds.engine.launch import train

        return train(arguments)
    except UserError as error:
        from omni_ds.engine.environment import is_rank_0

        if is_rank_0():
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe (head) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:  # noqa: BLE001  a fault of ours: say where, end at once, and let the launcher end the others
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    sys.exit(main())
