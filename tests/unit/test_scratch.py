"""What the worker says of the folder for weights and caches, from tables of mounts as containers see them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.worker_runs import lines, records, run_worker, write_run
from worker.contract.logs import configure_logs
from worker.scratch import Mount, check_scratch, fault_of, mount_of

LAYERS = "600 500 0:52 / / rw,relatime master:200 - overlay overlay rw,lowerdir=/l/A:/l/B,upperdir=/u,workdir=/w"
PROC = "601 600 0:55 / /proc rw,nosuid - proc proc rw"
HOSTS_ON_ROOT = (
    "620 600 259:1 /var/lib/docker/containers/0abc/hosts /etc/hosts rw,noatime - xfs /dev/nvme0n1p1 rw,attr2"
)
HOSTS_ON_RAID = "620 600 9:0 /docker/containers/0abc/hosts /etc/hosts rw,noatime - xfs /dev/md0 rw"
HOSTS_IN_MEMORY = "620 600 0:24 /containers/0abc/hosts /etc/hosts rw - tmpfs tmpfs rw,size=3252232k"

RAID = "630 600 9:0 / /scratch rw,noatime - xfs /dev/md0 rw,attr2,sunit=1024"
NVME = "630 600 259:3 / /scratch rw,noatime shared:9 - ext4 /dev/nvme1n1 rw"
MEMORY = "630 600 0:60 / /scratch rw - tmpfs tmpfs rw,size=1g"
ROOT_FOLDER = "630 600 259:1 /scratch /scratch rw,noatime - xfs /dev/nvme0n1p1 rw,attr2"
DATA_FOLDER = "630 600 259:3 /mine/scratch /scratch rw,noatime - xfs /dev/nvme1n1 rw"

IN_CONTAINER = [LAYERS, PROC, HOSTS_ON_ROOT]


def fault(*table: str) -> str | None:
    mounts = [Mount.of(line) for line in table]
    return fault_of(mount_of(Path("/scratch"), mounts), mounts)


@pytest.mark.parametrize("mounted", [RAID, NVME, MEMORY])
def test_a_file_system_that_is_mounted_whole_is_a_device_of_its_own(mounted: str) -> None:
    assert fault(*IN_CONTAINER, mounted) is None


def test_a_folder_of_the_hosts_root_volume_is_told_though_its_device_is_not_that_of_the_containers_root() -> None:
    said = fault(*IN_CONTAINER, ROOT_FOLDER)

    assert said == "it is no file system of its own, but the folder /scratch of /dev/nvme0n1p1"


def test_a_folder_of_another_disk_than_dockers_is_a_device_of_its_own() -> None:
    assert fault(*IN_CONTAINER, DATA_FOLDER) is None


@pytest.mark.parametrize("hosts", [HOSTS_IN_MEMORY, PROC])
def test_a_folder_is_doubted_where_nothing_shows_which_disk_is_the_hosts(hosts: str) -> None:
    said = fault(LAYERS, hosts, DATA_FOLDER)

    assert said is not None
    assert "/mine/scratch of /dev/nvme1n1" in said


def test_local_disks_that_docker_keeps_its_own_data_on_are_no_fault() -> None:
    assert fault(LAYERS, PROC, HOSTS_ON_RAID, RAID) is None


def test_a_container_without_the_mount_is_told() -> None:
    assert fault(*IN_CONTAINER) == "nothing is mounted there; it is part of the root file system"


def test_a_machine_by_hand_whose_scratch_is_on_the_device_of_its_root_is_told() -> None:
    root = "25 1 259:1 / / rw - ext4 /dev/nvme0n1p1 rw"

    assert fault(root) == "nothing is mounted there; it is part of the root file system"
    assert fault(root, ROOT_FOLDER) == "it is on the same device as / (/dev/nvme0n1p1)"
    assert fault(root, RAID) is None


def test_of_several_mounts_the_nearest_counts_and_of_two_at_one_place_the_last() -> None:
    beside = "631 600 8:1 / /scratchy rw - ext4 /dev/sda1 rw"
    below = "632 600 8:2 / /scratch/deeper rw - ext4 /dev/sdb1 rw"
    mounts = [Mount.of(line) for line in (LAYERS, NVME, RAID, beside, below)]

    assert mount_of(Path("/scratch"), mounts).source == "/dev/md0"
    assert mount_of(Path("/scratch/work"), mounts).source == "/dev/md0"
    assert mount_of(Path("/scratch/deeper/still"), mounts).source == "/dev/sdb1"
    assert mount_of(Path("/scratchy"), mounts).source == "/dev/sda1"


def test_a_line_is_read_with_its_blanks_and_with_any_number_of_optional_fields() -> None:
    read = Mount.of(r"36 35 98:0 /a\040b /mnt/c\134d rw,noatime master:1 propagate_from:2 - ext3 /dev/my\040disk rw")

    assert read == Mount("98:0", "/a b", "/mnt/c\\d", "ext3", "/dev/my disk")


def events_of(folder: Path, table: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    configure_logs({})
    check_scratch(folder, table)
    return [orjson.loads(line) for line in capsys.readouterr().out.split("\n") if line]


def table_of(tmp_path: Path, *table: str) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text("".join(f"{line}\n" for line in table), encoding="utf-8")
    return path


def mounted_at(folder: Path) -> str:
    return f"630 600 9:0 / {folder} rw - xfs /dev/md0 rw"


def test_a_disk_of_its_own_is_logged_with_its_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (event,) = events_of(tmp_path, table_of(tmp_path, *IN_CONTAINER, mounted_at(tmp_path)), capsys)

    space = os.statvfs(tmp_path)
    assert (event["level"], event["event"]) == ("info", "scratch.checked")
    assert (event["folder"], event["device"], event["file_system"]) == (str(tmp_path), "/dev/md0", "xfs")
    assert event["size_bytes"] == space.f_frsize * space.f_blocks
    assert 0 <= event["free_bytes"] <= event["size_bytes"]


def test_a_missing_mount_is_a_warning_with_a_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (event,) = events_of(tmp_path, table_of(tmp_path, *IN_CONTAINER), capsys)

    assert (event["level"], event["event"]) == ("warning", "scratch.not_mounted")
    assert event["message"].startswith(f"check {tmp_path}: nothing is mounted there")
    assert event["hint"].startswith("take hosts with local disks and mount those there before Docker starts")
    assert event["free_bytes"] > 0


def test_a_missing_folder_is_the_same_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "none"

    (event,) = events_of(folder, table_of(tmp_path, *IN_CONTAINER, mounted_at(folder)), capsys)

    assert event["event"] == "scratch.not_mounted"
    assert event["message"] == f"check {folder}: there is no such folder"


@pytest.mark.parametrize(
    "table", ["", "\n\n", "no table of mounts\n", f"{PROC}\n", f"{LAYERS}\n600 500 0:52\n", "\xff - \n"]
)
def test_a_table_that_cannot_be_read_is_said_and_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], table: str
) -> None:
    path = tmp_path / "mountinfo"
    path.write_bytes(table.encode("latin-1"))

    assert [event["event"] for event in events_of(tmp_path, path, capsys)] == ["scratch.unchecked"]
    assert [event["event"] for event in events_of(tmp_path, tmp_path / "none", capsys)] == ["scratch.unchecked"]


def test_links_in_a_circle_are_said_and_stop_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop").symlink_to("loop")
    table = table_of(tmp_path, *IN_CONTAINER)

    for folder in (tmp_path / "loop", tmp_path / "loop" / "deeper"):
        assert [event["event"] for event in events_of(folder, table, capsys)] == ["scratch.unchecked"]


CHECK = """
import sys
from pathlib import Path
from worker.contract.logs import configure_logs
from worker.scratch import check_scratch
configure_logs({})
check_scratch(Path(sys.argv[1]))
"""


def in_new_mounts(commands: str, folder: Path) -> dict[str, Any]:
    """What is said of a folder after real mounts that nobody else sees."""
    unshared = ["unshare", "--map-root-user", "--mount", "sh", "-ec"]
    probe = subprocess.run([*unshared, f"mount -t tmpfs none {folder}"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"no mounts of one's own here: {probe.stderr.decode().strip()}")
    program = [f'{commands}\nexec "$@"', "sh", sys.executable, "-c", CHECK, str(folder)]
    done = subprocess.run([*unshared, *program], capture_output=True, check=True, cwd=Path(__file__).parents[2])
    found: dict[str, Any] = orjson.loads(done.stdout)
    return found


def test_a_real_mount_of_a_file_system_is_told_from_a_real_mount_of_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    other = tmp_path / "other"
    folder.mkdir()
    other.mkdir()

    whole = in_new_mounts(f"mount -t tmpfs -o size=8m scratch {folder}", folder)
    bound = in_new_mounts(f"mount --bind {other} {folder}", folder)
    part = in_new_mounts(f"mount -t tmpfs none {other}; mkdir {other}/deep; mount --bind {other}/deep {folder}", folder)

    assert (whole["event"], whole["file_system"], whole["size_bytes"]) == ("scratch.checked", "tmpfs", 8 << 20)
    assert bound["event"] == part["event"] == "scratch.not_mounted"
    assert "the folder /deep of none" in part["message"]


def test_a_worker_on_aws_batch_says_so_and_does_its_work(tmp_path: Path) -> None:
    run_uri = str(tmp_path / "run")
    write_run(run_uri, [lines(records(3))])

    ended = run_worker(run_uri, "--index", "0", variables={"AWS_BATCH_JOB_ID": "job"})

    (said,) = [event for event in ended.events if event["event"].startswith("scratch.")]
    assert said["folder"] == "/scratch"
    assert ended.events.index(ended.one("worker.started")) < ended.events.index(said)
    assert ended.exit_code == 0, ended


@pytest.mark.parametrize("variables", [{}, {"AWS_BATCH_JOB_ID": "local", "LLM_ARRAY_PARENT_PID": str(os.getpid())}])
def test_a_worker_elsewhere_has_nothing_to_say(tmp_path: Path, variables: dict[str, str]) -> None:
    run_uri = str(tmp_path / "run")
    write_run(run_uri, [lines(records(3))])

    ended = run_worker(run_uri, "--index", "0", "--work-dir", str(tmp_path), variables=variables)

    assert [event["event"] for event in ended.events if event["event"].startswith("scratch.")] == []
