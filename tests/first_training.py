"""From nothing to the first training: the commands of docs/install.md for a wheel, in an empty folder, timed.

    python3 -m tests.first_training FOLDER     in a checkout; takes any Python with venv, and nothing installed

`python -m build` makes the sdist, and the wheel from the sdist. Then the commands of the section "With a wheel" run in
FOLDER, which has only the wheel. It fails if there are more than four, if they take more than five minutes together, or
if the training prints no result. Afterwards the sdist is installed in place of the wheel.
"""

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMANDS, SECONDS = 4, 300
RESULT = re.compile(r"test accuracy +[\d.]+ %")


def commands_of(page: str) -> list[str]:
    """Return the commands in the section "With a wheel" of a page, without their comments."""
    block = re.search(r"^## With a wheel\n.*?^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return [line.split("  #")[0].strip() for line in block[1].splitlines()] if block else []


def cores() -> float:
    """Return the processor time of all commands so far, in seconds: a busy machine makes it hardly longer."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def follow(
    commands: Sequence[str], folder: Path, env: Mapping[str, str], limit: float = SECONDS, clock=time.monotonic
) -> float:
    """Run commands in a folder, and print the seconds of each; return those of all, which may be `limit` at most.

    Raises:
        SystemExit: if a command fails, if there are too many, if they take too long, or if the last prints no result.
    """
    if not 0 < len(commands) <= COMMANDS:
        sys.exit(f"first training: expected 1 to {COMMANDS} commands in docs/install.md, got {len(commands)}")
    total = 0.0
    for command in commands:
        print(f"$ {command}", flush=True)
        start, used = clock(), cores()
        ended = subprocess.run(command, shell=True, cwd=folder, env=env, check=False, stdout=subprocess.PIPE, text=True)
        seconds = clock() - start
        total += seconds
        note = f"[{seconds:.0f} s; {cores() - used:.0f} s of processor time]"
        shown = ended.stdout.splitlines()[0 if ended.returncode else -20 :]
        print(*shown, note, sep="\n", flush=True)
        if ended.returncode:
            sys.exit(f"first training: {command}: exit code {ended.returncode}")
    if not RESULT.search(ended.stdout):
        sys.exit(f"first training: {commands[-1]}: expected a line with the test accuracy, there is none")
    if total > limit:
        sys.exit(f"first training: expected at most {limit:g} s, got {total:.0f} s")
    return total


def build(folder: Path) -> tuple[Path, Path]:
    """Make the sdist, and the wheel from it, with tools of their own; return the paths of the sdist and the wheel."""
    subprocess.run([sys.executable, "-m", "venv", folder / "tools"], check=True)
    tools = folder / "tools" / "bin" / "python"
    subprocess.run([tools, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "build"], check=True)
    made = subprocess.run([tools, "-m", "build", "--outdir", folder, ROOT], check=False, capture_output=True, text=True)
    if made.returncode:
        sys.exit(f"first training: python -m build: exit code {made.returncode}\n{made.stdout}{made.stderr}")
    shutil.rmtree(folder / "tools")
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def main() -> None:
    """Build, follow the commands, and install the sdist."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="new folder; its env remains")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit; more where other work runs beside it")
    options = parser.parse_args()
    folder = options.folder.resolve()
    (folder / "built").mkdir(parents=True)
    sdist, wheel = build(folder / "built")
    shutil.copy(wheel, folder)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON") and name != "VIRTUAL_ENV"}
    # The page's python3 is the one that runs this.
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    seconds = follow(commands_of((ROOT / "docs" / "install.md").read_text()), folder, env, options.seconds)
    print(f"first training: {seconds:.0f} s from an empty folder to the result", flush=True)
    pip = [folder / "env" / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--force-reinstall", sdist], check=True, cwd=folder, env=env)
    subprocess.run([folder / "env" / "bin" / "hvdx", "--version"], check=True, cwd=folder, env=env)


if __name__ == "__main__":
    main()
