"""`hvdx doctor --batch` with stand-ins for the commands of Slurm, PBS and LSF."""

# Tests: hvdx/cli/diagnosis/checks.py, hvdx/cli/batch/probe.py, hvdx/cli/batch/systems.py

import json
import shlex

import pytest

from hvdx.cli import doctor as doctor_command
from hvdx.cli.batch import probe as batch_probe
from hvdx.cli.batch.probe import Attempt, Request, Task, choose_plugin, request_from, tasks_in
from hvdx.cli.batch.systems import SlurmSite, default_partition, hosts_of_job, job_of, plugins
from hvdx.cli.common.mpi_tools import Mpi, host_options
from hvdx.cli.common.processes import run
from hvdx.cli.diagnosis.checks import ways
from hvdx.cli.main import main

TOLD = 'HVDX {{"host": "n{host}", "rank": {rank}, "size": {size}, "library": "Open MPI 5.0.8", "failure": ""}}'
GOOD = [TOLD.format(host=1, rank=0, size=2), TOLD.format(host=2, rank=1, size=2)]
SINGLETONS = [TOLD.format(host=1, rank=0, size=1), TOLD.format(host=2, rank=0, size=1)]
ONE_HOST = [TOLD.format(host=1, rank=0, size=2), TOLD.format(host=1, rank=1, size=2)]
GOOD_VALUE = "rank 0 of 2 on n1, rank 1 of 2 on n2; Open MPI 5.0.8"
FOREVER = ["exec /bin/sleep 60"]


def echo(lines):
    return [f"echo {shlex.quote(line)}" for line in lines]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Make a PATH that holds only the test's own commands; `site.calls("srun")` returns the arguments of its calls."""

    class Site:
        def __init__(self):
            self.bin = tmp_path / "bin"
            self.bin.mkdir()

        def put(self, name, *lines):
            path = self.bin / name
            path.write_text("\n".join(["#!/bin/sh", f'printf "%s\\n" "$*" >>"{tmp_path}/{name}.calls"', *lines, ""]))
            path.chmod(0o755)
            return path

        def calls(self, name):
            path = tmp_path / f"{name}.calls"
            return path.read_text() if path.exists() else ""

        def mpirun(self, lines):
            self.put("mpirun", *echo(lines))

    made = Site()
    monkeypatch.setenv("PATH", str(made.bin))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "SBATCH_ACCOUNT", "SBATCH_PARTITION", "SLURM_MPI_TYPE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("SLURM_JOB_NUM_NODES", "PBS_NODEFILE", "LSB_DJOB_HOSTFILE"):
        monkeypatch.delenv(name, raising=False)
    path, made.vendor = made.bin / "mpirun", "Open MPI"
    monkeypatch.setattr(
        doctor_command,
        "find_mpi",
        lambda: Mpi(mpirun=str(path), launcher_vendor=made.vendor) if path.exists() else Mpi(),
    )
    return made


@pytest.fixture
def slurm(site):
    """Make a Slurm without sbatch, whose srun runs the lines given to `site.srun(...)`."""

    def srun(*lines):
        listed = r"printf 'MPI plugin types are...\n\tpmix\n\tnone\n\tpmi2\n'; exit 0"
        site.put("srun", f'[ "$1" = --mpi=list ] && {{ {listed}; }}', *lines)

    site.srun = srun
    site.put("sinfo", *echo(["day*|1:00:00|4", "week|7-00:00:00|9"]))
    site.put("scontrol", *echo(["MpiDefault              = none"]))
    site.put("squeue", *echo(["PENDING (Priority)"]))
    site.put("scancel")
    return site


@pytest.fixture
def pbs(site):
    """Make a PBS that runs a submitted script at once."""
    _runs_its_script(site, "qsub", '[ "$1" = --version ] && echo "pbs_version = 23.06.06" && exit 0', "12.server")
    for name in ("qstat", "pbsnodes", "qdel"):
        site.put(name)
    return site


@pytest.fixture
def lsf(site):
    """Make an LSF that runs a submitted script at once."""
    _runs_its_script(site, "bsub", "", "Job <77> is submitted to queue <normal>.")
    site.put("lsid", *echo(["IBM Spectrum LSF Standard 10.1.0.12, Jun 10 2022"]))
    for name in ("bjobs", "bkill"):
        site.put(name)
    return site


def _runs_its_script(site, name, version, submitted):
    take = 'while [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done'
    site.put(name, version, f"echo {shlex.quote(submitted)}", take, '"$1" >"$out" 2>&1')


@pytest.fixture
def doctor(capsys):
    """Return a function that runs `hvdx doctor --batch --json`; it returns exit code and checks by name."""

    def ask(*options):
        code = main(["doctor", "--batch", "--json", *options])
        return code, {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}

    return ask


# --- detection


def test_no_batch_system_is_a_problem_with_a_remedy(site, doctor):
    code, found = doctor()
    assert code == 1
    assert list(found) == ["batch system"]
    assert found["batch system"]["value"] == "no commands of Slurm, PBS or LSF on PATH"
    assert "login node" in found["batch system"]["remedy"]


def test_batch_system_that_does_not_answer_gets_no_job(slurm, doctor):
    slurm.put("sbatch", "echo 'sbatch: error: failed to fetch config' >&2", "exit 1")
    slurm.srun(*echo(GOOD))
    code, found = doctor()
    assert code == 1
    assert list(found) == ["batch system"]
    assert found["batch system"]["value"] == "Slurm does not answer: sbatch: error: failed to fetch config"
    assert slurm.calls("srun") == ""


def test_slurm_settings_are_reported(slurm, doctor):
    slurm.srun(*echo(GOOD))
    code, found = doctor()
    assert code == 0
    assert found["batch system"] == {
        "name": "batch system",
        "status": "warning",
        "value": "Slurm of unknown version: srun, scontrol, sinfo, squeue, scancel; without sbatch",
        "remedy": "these commands of the batch system are not on PATH; loading a module may add them",
    }
    assert found["default partition"]["value"] == "day, time limit 1:00:00, 4 nodes"
    assert found["srun --mpi"]["value"] == "pmix, none, pmi2; none by default"
    assert found["srun --mpi=pmix"]["value"] == GOOD_VALUE


def test_no_default_partition_says_how_to_name_one(slurm, doctor):
    slurm.srun(*echo(GOOD))
    slurm.put("sinfo", *echo(["day|1:00:00|4"]))
    assert doctor()[1]["default partition"]["status"] == "warning"
    assert doctor("--partition", "day")[1]["default partition"]["value"] == "none; day is requested"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("MPI plugin types are...\n\tpmix\n\tcray_shasta\n\tnone\n", ("pmix", "cray_shasta", "none")),
        ("srun: MPI types are...\nsrun: pmix_v3\nsrun: pmi2\n", ("pmix_v3", "pmi2")),
        (
            "MPI plugin types are...\n\tpmix\nspecific pmix plugin versions available: pmix_v3,pmix_v4",
            ("pmix", "pmix_v3", "pmix_v4"),
        ),
        ("srun: fatal: Could not establish a configuration source", ()),
    ],
)
def test_plugins_in_each_version_of_srun(text, names):
    assert plugins(text) == names


def test_default_partition_adds_nodes_in_all_states():
    assert default_partition("a*|1:00:00|2\nb|infinite|1\na*|1:00:00|3\n") == ("a", "1:00:00", 5)
    assert default_partition("") == ("", "", 0)


@pytest.mark.parametrize(("name", "variable"), [("Slurm", "SLURM_JOB_ID"), ("PBS", "PBS_JOBID"), ("LSF", "LSB_JOBID")])
def test_job_of(name, variable):
    assert job_of(name, {variable: "7"}) == "7"
    assert job_of(name, {}) == ""


# --- request


def test_options_override_the_environment_which_overrides_the_site_file(tmp_path):
    site = tmp_path / "site.toml"
    site.write_text('account = "biology"\n[slurm]\npartition = "gpu"\nmpi_plugin = "pmix_v4"\n[pbs]\nqueue = "workq"\n')
    said = {"HVDX_SITE": str(site)}
    assert request_from(said, Request()) == Request("biology", "gpu", "pmix_v4")
    environ = said | {"SBATCH_ACCOUNT": "physics", "SBATCH_PARTITION": "long", "SLURM_MPI_TYPE": "pmi2"}
    assert request_from(environ, Request()) == Request("physics", "long", "pmi2")
    assert request_from(environ, Request("maths", "short", "none")) == Request("maths", "short", "none")
    # Slurm's variables do not apply to PBS.
    assert request_from(environ, Request(), "pbs") == Request("biology", "workq", "")


@pytest.fixture(autouse=True)
def _no_site_file(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "nothing"))
    monkeypatch.delenv("HVDX_SITE", raising=False)


def test_plugin_is_the_wanted_one_or_pmix_or_the_default():
    assert choose_plugin("pmi2", SlurmSite(plugins=("pmix",))) == "pmi2"
    assert choose_plugin("", SlurmSite(plugins=("pmix", "pmi2"))) == "pmix"
    assert choose_plugin("", SlurmSite(plugins=("pmi2",))) == ""


def test_srun_gets_account_partition_nodes_and_a_time_limit(slurm, doctor, monkeypatch):
    slurm.srun(*echo(GOOD))
    monkeypatch.setenv("SBATCH_ACCOUNT", "physics")
    doctor("--partition", "short", "--nodes", "1")
    asked = slurm.calls("srun").splitlines()[1].split()
    assert {"--account=physics", "--partition=short", "--nodes=1", "--ntasks=2", "--time=2", "--mpi=pmix"} <= {*asked}
    assert "--ntasks-per-node=2" in asked


def test_inside_a_job_srun_requests_no_new_job(slurm, doctor, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    slurm.srun(*echo(GOOD))
    slurm.mpirun(GOOD)
    code, found = doctor()
    assert code == 0
    assert found["inside a job"]["value"] == "yes, Slurm job 7"
    assert found["mpirun"]["value"] == GOOD_VALUE
    assert slurm.calls("srun").splitlines()[1].startswith("--mpi=pmix -n 2 --nodes=1 ")


# --- reports of the tasks


def test_singletons_of_srun_are_a_problem(slurm, doctor):
    slurm.srun(*echo(SINGLETONS))
    code, found = doctor("--mpi", "pmi2")
    check = found["srun --mpi=pmi2"]
    assert code == 1
    assert check["status"] == "problem"
    assert check["value"] == "2 tasks, each 'rank 0 of 1', on n1, n2; Open MPI 5.0.8"
    assert check["remedy"].startswith("srun --mpi=pmix (this MPI may support it); or start the ranks with mpirun")
    assert "--no-binary mpi4py" in check["remedy"]


def test_singletons_under_the_only_fitting_plugin(slurm, doctor):
    slurm.srun(*echo(SINGLETONS))
    remedy = doctor()[1]["srun --mpi=pmix"]["remedy"]
    assert remedy.startswith("none of srun's plugins (pmix, none, pmi2) fits Open MPI 5.0.8; or start the ranks")


def test_singletons_of_mpich_lead_to_pmi2():
    tasks = (Task("a", 0, 1, "MPICH 4.2.0"), Task("b", 0, 1, "MPICH 4.2.0"))
    plugged = SlurmSite(plugins=("pmix", "none", "pmi2"))
    (check,) = ways([Attempt("srun --mpi=none", tasks)], Request(), plugged, Mpi())
    assert "srun --mpi=pmi2" in check.remedy


def test_failure_beside_a_working_way_is_a_warning():
    good = Attempt("mpirun in a job", tasks_in("\n".join(GOOD)))
    bad = Attempt("srun", tasks_in("\n".join(SINGLETONS)))
    checks = ways([bad, good], Request(), SlurmSite(), Mpi())
    assert [check.status for check in checks] == ["warning", "ok"]
    assert checks[0].remedy.startswith("mpirun in a job works: use that.")


def test_failure_of_a_chosen_plugin_stays_a_problem():
    good = Attempt("mpirun in a job", tasks_in("\n".join(GOOD)))
    bad = Attempt("srun --mpi=pmi2", tasks_in("\n".join(SINGLETONS)))
    statuses = [check.status for check in ways([bad, good], Request(mpi="pmi2"), SlurmSite(), Mpi())]
    assert statuses == ["problem", "ok"]


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_batch_timeout_is_a_time(text):
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--batch", "--batch-timeout", text])


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("slurmstepd: error: execve(): /home/me/python: No such file or directory", "file system that they share"),
        (
            "srun: error: Unable to allocate resources: Invalid account or account/partition combination",
            "--account NAME",
        ),
        ("sbatch: error: Batch job submission failed: Invalid account", "--account NAME"),
        ("srun: error: Unable to allocate: Requested node configuration is not available", "--nodes 1"),
        ("srun: error: Invalid MPI type 'foo', --mpi=list for acceptable types", "--mpi NAME"),
        ("*** Error in MPI_Init_thread", "rebuild mpi4py"),
    ],
)
def test_failures_have_a_remedy(slurm, doctor, said, remedy):
    slurm.srun(f"echo {shlex.quote(said)} >&2", "exit 1")
    code, found = doctor()
    assert code == 1
    assert found["srun --mpi=pmix"]["value"] == said
    assert remedy in found["srun --mpi=pmix"]["remedy"]


def test_mpi4py_without_a_library_on_the_nodes(slurm, doctor):
    failure = "ImportError: libmpi.so.40: cannot open shared object file: No such file or directory"
    told = json.dumps({"host": "n1", "rank": None, "size": None, "library": "", "failure": failure})
    slurm.srun(*echo([f"HVDX {told}"] * 2))
    check = doctor()[1]["srun --mpi=pmix"]
    assert check["value"] == f"mpi4py cannot be imported on n1: {failure}"
    assert "load its module in the job" in check["remedy"]


def test_one_task_of_two_is_a_problem(slurm, doctor):
    slurm.srun(*echo(GOOD[:1]))
    assert doctor()[1]["srun --mpi=pmix"]["value"] == "expected ranks 0 and 1 of 2, got [(0, 2)]"


def test_tasks_are_read_from_shared_and_truncated_lines():
    assert [task.rank for task in tasks_in(GOOD[1] + "noise" + GOOD[0] + "HVDX {'a")] == [0, 1]
    assert tasks_in('HVDX {"other": 1}') == ()


# --- PBS and LSF


def test_pbs(pbs, doctor):
    pbs.mpirun(GOOD)
    code, found = doctor("--account", "physics", "--partition", "short")
    assert code == 0
    assert found["batch system"]["value"] == "PBS 23.06.06: qsub, qstat, pbsnodes, qdel"
    assert found["mpirun in a job"]["value"] == GOOD_VALUE
    asked = pbs.calls("qsub").splitlines()[1]
    for option in ("-W block=true", "-A physics", "-q short", "walltime=00:02:00", "select=2:ncpus=1:mpiprocs=1"):
        assert option in asked


def test_lsf(lsf, doctor):
    lsf.mpirun(GOOD)
    code, found = doctor("--account", "physics", "--partition", "short")
    assert code == 0
    assert found["batch system"]["value"] == "LSF 10.1.0.12: bsub, lsid, bjobs, bkill"
    assert found["mpirun in a job"]["value"] == GOOD_VALUE
    for option in ("-K", "-n 2", "-W 2", "-P physics", "-q short", "span[ptile=1]"):
        assert option in lsf.calls("bsub")


def test_lsf_with_jsrun(lsf, doctor):
    lsf.put("jsrun", *echo(GOOD))
    code, found = doctor()
    assert code == 0
    assert found["jsrun in a job"]["value"] == GOOD_VALUE
    assert "-nnodes 2" in lsf.calls("bsub")
    assert lsf.calls("jsrun").startswith("-n 2 -a 1 -c 1 -r 1 ")


def test_mpirun_of_another_mpi_gives_singletons(pbs, doctor):
    pbs.mpirun(SINGLETONS)
    code, found = doctor()
    assert code == 1
    assert "mpirun does not belong to Open MPI 5.0.8" in found["mpirun in a job"]["remedy"]


def test_failure_in_a_job_is_described_by_its_output(pbs, doctor):
    pbs.put("mpirun", "echo 'mpirun: error: no slots today' >&2", "exit 5")
    assert doctor()[1]["mpirun in a job"]["value"] == "mpirun: error: no slots today"


def test_without_mpirun_nothing_is_submitted(pbs, doctor):
    code, found = doctor()
    assert code == 1
    assert found["two tasks"]["status"] == "problem"
    assert "-W" not in pbs.calls("qsub")


# --- number of hosts


@pytest.mark.parametrize(
    ("vendor", "options"),
    [("Open MPI", "--map-by ppr:1:node --hostfile {}"), ("MPICH", "-ppn 1 -f {}"), ("Intel MPI", "-ppn 1 -f {}")],
)
@pytest.mark.parametrize(("system", "variable"), [("pbs", "PBS_NODEFILE"), ("lsf", "LSB_DJOB_HOSTFILE")])
def test_mpirun_is_given_the_hosts_of_the_job(
    system, variable, vendor, options, request, doctor, monkeypatch, tmp_path
):
    site, path = request.getfixturevalue(system), tmp_path / "the hosts"
    site.vendor = vendor
    site.mpirun(GOOD)
    path.write_text("n1\nn1\nn2\nn2\n")
    monkeypatch.setenv(variable, str(path))  # for the submitted job, whose script contains only the variable's name
    assert doctor()[0] == 0
    assert f" {options.format(path)} " in site.calls("mpirun")
    monkeypatch.setenv({"pbs": "PBS_JOBID", "lsf": "LSB_JOBID"}[system], "7")
    code, found = doctor()
    assert (code, found["mpirun"]["value"]) == (0, GOOD_VALUE)
    assert site.calls("mpirun").count(f" {options.format(path)} ") == 2


def test_mpirun_of_an_unknown_vendor_is_given_no_options():
    assert host_options(Mpi(mpirun="mpirun"), 1, "hosts") == []


@pytest.mark.parametrize(("fixture", "way"), [("pbs", "mpirun in a job"), ("lsf", "mpirun in a job")])
def test_two_tasks_on_one_host_of_two_are_a_problem(fixture, way, request, doctor):
    site = request.getfixturevalue(fixture)
    site.mpirun(ONE_HOST)
    code, found = doctor()
    check = found[way]
    assert (code, check["status"]) == (1, "problem")
    assert check["value"] == "expected tasks on 2 hosts, got rank 0 of 2 on n1, rank 1 of 2 on n1; Open MPI 5.0.8"
    assert check["remedy"].startswith(f"{site.bin / 'mpirun'} leaves a host of the job idle: load an MPI")
    assert check["remedy"].endswith("hvdx doctor --batch --nodes 1")
    code, found = doctor("--nodes", "1")
    assert (code, found[way]["status"]) == (0, "ok")
    assert "--map-by ppr:2:node" in site.calls("mpirun")


def test_two_tasks_of_srun_on_one_host_of_two_are_a_problem(slurm, doctor):
    slurm.srun(*echo(ONE_HOST))
    code, found = doctor()
    check = found["srun --mpi=pmix"]
    assert (code, check["status"]) == (1, "problem")
    assert "`hostname`" in check["remedy"]
    assert "--nodes 1" in check["remedy"]
    assert doctor("--nodes", "1")[0] == 0


def test_both_ways_of_slurm_must_use_two_hosts(slurm, doctor):
    slurm.srun(*echo(ONE_HOST))
    slurm.mpirun(ONE_HOST)
    take = "for word; do case $word in --output=*) out=${word#*=};; esac; last=$word; done"
    slurm.put("sbatch", '[ "$1" = --version ] && echo slurm 23.11.1 && exit 0', take, '"$last" >"$out" 2>&1')
    found = doctor()[1]
    assert [found[way]["status"] for way in ("srun --mpi=pmix", "mpirun in a job")] == ["problem"] * 2
    assert "--map-by ppr:1:node" in slurm.calls("mpirun")
    slurm.mpirun(GOOD)
    found = doctor()[1]
    assert [found[way]["status"] for way in ("srun --mpi=pmix", "mpirun in a job")] == ["warning", "ok"]


@pytest.mark.parametrize(("hosts", "status"), [("1", "ok"), ("2", "problem"), ("4", "problem")])
def test_inside_a_job_its_number_of_hosts_is_expected(hosts, status, slurm, doctor, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", hosts)
    slurm.srun(*echo(ONE_HOST))
    slurm.mpirun(ONE_HOST)
    found = doctor()[1]
    assert [found[way]["status"] for way in ("srun --mpi=pmix", "mpirun")] == [status] * 2
    assert f"-n 2 --nodes={min(int(hosts), 2)} " in slurm.calls("srun")
    assert f"--map-by ppr:{2 // min(int(hosts), 2)}:node" in slurm.calls("mpirun")


def test_intel_mpi_ignores_the_task_layout_of_the_job(pbs, doctor, monkeypatch):
    monkeypatch.setenv("PBS_JOBID", "7")
    pbs.put("mpirun", '[ "$I_MPI_JOB_RESPECT_PROCESS_PLACEMENT" = 0 ] || exit 1', *echo(GOOD))
    assert doctor()[1]["mpirun"]["status"] == "ok"


def test_hosts_of_job(tmp_path, site):
    (tmp_path / "hosts").write_text("n1\nn1\nn2\n")
    environ = {"PBS_NODEFILE": str(tmp_path / "hosts"), "LSB_DJOB_HOSTFILE": str(tmp_path / "hosts")}
    assert [hosts_of_job(name, environ) for name in ("PBS", "LSF", "Slurm")] == [2, 2, 1]
    assert [hosts_of_job(name, {}) for name in ("PBS", "LSF", "Slurm")] == [1, 1, 1]
    site.put("jsrun")
    assert hosts_of_job("LSF", environ) == 1


# --- waiting


def test_waiting_srun_is_ended_and_its_job_cancelled(slurm, doctor):
    slurm.srun(*FOREVER)
    code, found = doctor("--batch-timeout", "1")
    name = next(word for word in slurm.calls("srun").split() if word.startswith("--job-name="))
    assert slurm.calls("scancel").split() == [name.replace("--job-name", "--name")]
    check = found["srun --mpi=pmix"]
    assert check["value"] == "not started within 1 s: PENDING (Priority); the job was cancelled"
    assert "--batch-timeout" in check["remedy"]
    assert code == 1


def test_job_that_does_not_end_has_its_own_remedy(slurm, doctor):
    slurm.put("squeue", *echo(["RUNNING (None)"]))
    slurm.srun(*FOREVER)
    check = doctor("--batch-timeout", "1")[1]["srun --mpi=pmix"]
    assert check["value"].startswith("started, and did not end within 1 s")
    assert "network" in check["remedy"]


def test_job_that_cannot_be_cancelled_is_named(slurm, doctor):
    slurm.put("scancel", "exit 1")
    slurm.srun(*FOREVER)
    value = doctor("--batch-timeout", "1")[1]["srun --mpi=pmix"]["value"]
    assert "could not be cancelled, do: scancel --name=hvdx-" in value


def test_pbs_job_is_cancelled_by_its_id(pbs, doctor):
    pbs.mpirun(GOOD)
    pbs.put("qsub", '[ "$1" = --version ] && exit 0', "echo 12.server", *FOREVER)
    assert doctor("--batch-timeout", "1")[0] == 1
    assert pbs.calls("qdel") == "12.server\n"


def test_pbs_job_whose_id_is_unknown_is_cancelled_by_its_name(pbs, doctor):
    pbs.mpirun(GOOD)
    pbs.put("qsub", '[ "$1" = --version ] && exit 0', *FOREVER)
    pbs.put("qselect", "echo 13.server")
    assert doctor("--batch-timeout", "1")[0] == 1
    assert pbs.calls("qselect").startswith("-N hvdx-")
    assert pbs.calls("qdel") == "13.server\n"


def test_lsf_job_is_cancelled_by_its_name(lsf, doctor):
    lsf.mpirun(GOOD)
    lsf.put("bsub", "echo 'Job <77> is submitted to queue <normal>.'", *FOREVER)
    assert doctor("--batch-timeout", "1")[0] == 1
    asked = lsf.calls("bsub").split()
    assert lsf.calls("bkill").split() == ["-J", asked[asked.index("-J") + 1]]


def test_interrupt_cancels_the_job(slurm, monkeypatch):
    def interrupted(command, *limits):
        if "--ntasks=2" in command:
            raise KeyboardInterrupt
        return run(command, *limits)

    slurm.srun(*echo(GOOD))
    monkeypatch.setattr(batch_probe, "run", interrupted)
    assert main(["doctor", "--batch"]) != 0
    assert "--name=hvdx-" in slurm.calls("scancel")


def test_no_second_job_after_the_time_limit(slurm, doctor):
    slurm.put("sbatch", "echo slurm 23.11.1")
    slurm.mpirun(GOOD)
    slurm.srun(*FOREVER)
    assert "mpirun in a job" not in doctor("--batch-timeout", "1")[1]
    assert slurm.calls("sbatch") == "--version\n"


def test_waiting_is_reported_on_standard_error(slurm, capsys):
    slurm.srun(*echo(GOOD))
    assert main(["doctor", "--batch"]) == 0
    said = capsys.readouterr()
    assert "srun --mpi=pmix: waiting for the batch system, 300 s at the most" in said.err
    assert said.out.rstrip().endswith("Ready to train.")
