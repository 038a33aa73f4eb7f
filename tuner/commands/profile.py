"""The ``tune profile`` command: measurement of a machine, or of a training script's workload."""

from pathlib import Path
from typing import Any

import click
from ebbtide.tuner.commands.options import JSON, guarded, needs
from ebbtide.tuner.files import BadInputError, check_distinct, check_folder
from ebbtide.tuner.lazy_group import Command


@click.command(
    cls=Command,
    epilog="Example: tune profile -o machine.json --storage-dir /checkpoints; "
    "tune profile --train-script train.py --launcher deepspeed --ranks 4 -- --epochs 1",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("-o", "--output", help="File to write (default: machine.json, or workload.json with --train-script).")
@click.option("--storage-dir", help="Folder for checkpoints. The write rate of its disk is measured.")
@click.option(
    "--drive",
    multiple=True,
    help="Folder on a drive for optimizer state (`tune plan --storage`). The read and write rates of the drive are "
    "measured. May be repeated.",
)
@click.option(
    "--seconds", default=30.0, show_default=True, help="Total duration of the measurement in seconds, at most 60."
)
@click.option("--fresh", is_flag=True, help="Measure again even if a cached result exists.")
@click.option(
    "--ranks",
    default=1,
    show_default=True,
    help="With a value N above 1, also measure how much of each bandwidth a process gets while N processes use it at "
    "the same time. With --train-script: number of ranks to launch.",
)
@click.option("--train-script", help="Training script to measure the workload of. Its arguments follow.")
@click.option(
    "--launcher",
    type=click.Choice(["none", "torchrun", "deepspeed"]),
    default="torchrun",
    show_default=True,
    help="Launcher that starts the script.",
)
@click.option(
    "--iterations",
    default=3,
    show_default=True,
    help="Number of optimizer steps to measure. On a GPU, twice as many are taken.",
)
@click.option("--continue", "go_on", is_flag=True, help="Let the script run to its end after the measurement.")
@click.option("--push", metavar="URL", help="Upload the machine profile to this server.")
@click.option("--replace", is_flag=True, help="With --push: replace another machine of the same name.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@JSON
@guarded
def profile(
    output: str | None,
    train_script: str | None,
    arguments: tuple[str, ...],
    ranks: int,
    launcher: Any,
    iterations: int,
    go_on: bool,
    storage_dir: str | None,
    drive: tuple[str, ...],
    seconds: float,
    fresh: bool,
    as_json: bool,
    push: str | None,
    replace: bool,
) -> None:
    """Measure this machine, or with --train-script the workload of a training script."""
    from ebbtide.tuner.commands.profiling import machine_profile, script_profile

    check_folder("--output", output)
    check_distinct("--output", output)
    needs("with --train-script", train_script is not None, "launcher", "iterations")
    needs("with --push", push is not None, "replace")
    needs("without --train-script", train_script is None, "seconds", "storage_dir", "drive", "fresh")
    if train_script is not None and push is not None:
        raise BadInputError(
            f"--push uploads a machine profile only, but got --train-script {train_script}: leave one of them out"
        )
    if train_script is not None:
        script_profile(
            output or "workload.json",
            train_script,
            arguments,
            launcher=launcher,
            ranks=ranks,
            iterations=iterations,
            go_on=go_on,
            as_json=as_json,
        )
        return
    if arguments or go_on:
        raise BadInputError(
            "--continue and the arguments of a training script must come after --train-script SCRIPT, but got only "
            f"{' '.join(arguments) or '--continue'}. Give --train-script SCRIPT first"
        )
    for folder in drive:
        if not Path(folder).is_dir():
            raise BadInputError(
                f"--drive must be a folder that exists, but got {folder}. Mount the drive or make the folder first"
            )
    if storage_dir is not None and Path(storage_dir).is_file():
        raise BadInputError(f"--storage-dir must be a folder, but {storage_dir} is a file")
    written = output or "machine.json"
    machine_profile(written, storage_dir, drive, seconds, ranks, fresh, as_json)
    if push is not None:
        from ebbtide.simulator.machine import Machine
        from ebbtide.tuner.service.client import push_machine

        push_machine(push, Machine.load(written), replace)
