"""The script that a host runs at each boot, under shellcheck, and run: with programs that stand in for those that touch disks."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "infra" / "scratch-boothook.sh"
INSTANCE_STORE = "Amazon EC2 NVMe Instance Storage"
EBS = "Amazon Elastic Block Store"

# Each stand-in says in `calls` that it was called. What it answers is in `state`: a volume's label, a mounted folder.
STAND_INS = {
    "lsblk": 'cat "$STATE/disks"',
    "blkid": '[ "$2" = scratch ] && [ -s "$STATE/labelled" ] && cat "$STATE/labelled"',
    "mkfs.xfs": 'for device; do :; done; echo "$device" > "$STATE/labelled"',
    "mdadm": 'if [ "$1" = --assemble ]; then [ -s "$STATE/array" ] && cp "$STATE/array" "$STATE/labelled"; fi',
    "mount": 'for folder; do :; done; echo "$folder" > "$STATE/mounted"',
    "mountpoint": '[ -e "$STATE/mounted" ] && [ "$(cat "$STATE/mounted")" = "$2" ]',
    "dnf": 'cp "$STATE/mdadm.later" "$BIN/mdadm"',
}
PLAIN = ("awk", "bash", "cat", "chmod", "cp", "mkdir", "timeout")


@dataclass
class Ended:
    exit_code: int
    said: str
    calls: list[str]
    """Of programs that change something, with their arguments."""


@dataclass
class Host:
    folder: Path
    failing: list[str] = field(default_factory=list)
    """Beginnings of calls that fail."""

    def __post_init__(self) -> None:
        self.bin, self.state, self.scratch = (self.folder / name for name in ("bin", "state", "scratch"))
        self.bin.mkdir()
        self.state.mkdir()
        for name in PLAIN:
            found = shutil.which(name)
            assert found
            (self.bin / name).symlink_to(found)
        for name, body in STAND_INS.items():
            self._install(self.bin / name, name, body)

    def has_disks(self, *models: str) -> None:
        """Disks of these models, one each."""
        (self.state / "disks").write_text("".join(f"/dev/nvme{n}n1 {model}\n" for n, model in enumerate(models)))

    def has_no_mdadm(self) -> None:
        (self.bin / "mdadm").rename(self.state / "mdadm.later")

    def reboots(self) -> None:
        """Mounts go; what is on the disks stays, and an array is not put together yet."""
        (self.state / "mounted").unlink()
        labelled = self.state / "labelled"
        if labelled.read_text().startswith("/dev/md"):
            labelled.rename(self.state / "array")

    def boots(self) -> Ended:
        calls = self.state / "calls"
        calls.write_text("")
        environment = {
            "PATH": str(self.bin),
            "STATE": str(self.state),
            "BIN": str(self.bin),
            "FAILING": "\n".join(self.failing),
        }
        done = subprocess.run(
            [self.bin / "bash", SCRIPT, self.scratch], env=environment, capture_output=True, text=True, check=False
        )
        assert done.stdout == ""
        looks = ("lsblk", "blkid", "mountpoint")
        called = [call for call in calls.read_text().splitlines() if not call.startswith(looks)]
        return Ended(done.returncode, done.stderr, called)

    @property
    def mounted(self) -> str | None:
        mounted = self.state / "mounted"
        return mounted.read_text().strip() if mounted.exists() else None

    def _install(self, path: Path, name: str, body: str) -> None:
        path.write_text(
            "#!/bin/bash\n"
            f'call="{name} $*"; echo "$call" >> "$STATE/calls"\n'
            'while IFS= read -r start; do [ -n "$start" ] && [[ $call == "$start"* ]] && exit 1; done <<< "$FAILING"\n'
            f"{body}\n"
        )
        path.chmod(0o755)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def verbs(calls: Sequence[str]) -> list[str]:
    return [" ".join(call.split()[:2]) if call.startswith("mdadm") else call.split()[0] for call in calls]


def test_shellcheck_has_nothing_to_say() -> None:
    checked = subprocess.run(
        [Path(sys.executable).with_name("shellcheck"), SCRIPT], capture_output=True, text=True, check=False
    )

    assert (checked.stdout, checked.returncode) == ("", 0)


def test_a_host_without_disks_of_its_own_says_so_and_boots(host: Host) -> None:
    host.has_disks(EBS)

    ended = host.boots()

    assert ended.exit_code == 0
    assert "no NVMe disks of its own" in ended.said
    assert ended.calls == []
    assert host.mounted is None


def test_one_disk_is_a_volume_without_an_array(host: Host) -> None:
    host.has_disks(EBS, INSTANCE_STORE)

    ended = host.boots()

    assert ended.exit_code == 0
    assert verbs(ended.calls) == ["mkfs.xfs", "mount"]
    assert "/dev/nvme1n1" in ended.calls[0]
    assert host.mounted == str(host.scratch)


@pytest.mark.parametrize("count", [2, 8])
def test_several_disks_become_one_volume_and_the_root_volume_is_none_of_them(host: Host, count: int) -> None:
    host.has_disks(*[INSTANCE_STORE] * (count - 1), EBS, INSTANCE_STORE)

    ended = host.boots()

    assert ended.exit_code == 0
    (create,) = [call for call in ended.calls if call.startswith("mdadm --create")]
    assert f"--level=0 --raid-devices={count}" in create
    assert create.count("/dev/nvme") == count
    assert f"/dev/nvme{count - 1}n1" not in create
    assert verbs(ended.calls)[-2:] == ["mkfs.xfs", "mount"]
    assert ended.calls[-1].endswith(f"/dev/md/scratch {host.scratch}")


@pytest.mark.parametrize("disks", [[], [INSTANCE_STORE], [INSTANCE_STORE] * 8], ids=["none", "one", "eight"])
def test_containers_of_any_user_may_write_there(host: Host, disks: list[str]) -> None:
    host.has_disks(EBS, *disks)

    host.boots()

    assert stat.S_IMODE(host.scratch.stat().st_mode) == 0o1777


@pytest.mark.parametrize("count", [1, 8])
def test_the_next_boot_mounts_what_is_there_and_makes_nothing(host: Host, count: int) -> None:
    host.has_disks(EBS, *[INSTANCE_STORE] * count)
    host.boots()
    host.reboots()

    ended = host.boots()

    assert ended.exit_code == 0
    assert host.mounted == str(host.scratch)
    assert not any(call.startswith(("mkfs", "mdadm --create", "mdadm --zero", "mdadm --stop")) for call in ended.calls)


def test_run_again_on_a_host_that_is_up_it_does_nothing(host: Host) -> None:
    host.has_disks(INSTANCE_STORE, INSTANCE_STORE)
    host.boots()

    ended = host.boots()

    assert (ended.exit_code, ended.calls, ended.said) == (0, [], "")


def test_a_boot_that_was_cut_short_before_the_file_system_is_made_up_for(host: Host) -> None:
    host.has_disks(INSTANCE_STORE, INSTANCE_STORE)
    host.failing = ["mkfs.xfs", "mount"]
    host.boots()
    host.failing = []

    ended = host.boots()

    assert ended.exit_code == 0
    assert host.mounted == str(host.scratch)
    assert [verb for verb in verbs(ended.calls) if verb in ("mdadm --stop", "mdadm --create")] == [
        "mdadm --stop",
        "mdadm --create",
    ]


def test_mdadm_is_installed_where_it_is_missing(host: Host) -> None:
    host.has_disks(INSTANCE_STORE, INSTANCE_STORE)
    host.has_no_mdadm()

    ended = host.boots()

    assert ended.exit_code == 0
    assert "dnf" in verbs(ended.calls)
    assert "mdadm --create" in verbs(ended.calls)


@pytest.mark.parametrize("failing", ["dnf", "mdadm --create"])
def test_without_an_array_the_first_disk_is_used_and_that_is_said(host: Host, failing: str) -> None:
    host.has_disks(EBS, INSTANCE_STORE, INSTANCE_STORE)
    if failing == "dnf":
        host.has_no_mdadm()
    host.failing = [failing]

    ended = host.boots()

    assert ended.exit_code == 0
    assert "no RAID 0 over 2 disks: using /dev/nvme1n1 alone" in ended.said
    assert ended.calls[-1].endswith(f"/dev/nvme1n1 {host.scratch}")


@pytest.mark.parametrize("failing", ["mkfs.xfs", "mount"])
@pytest.mark.parametrize("count", [1, 2])
def test_disks_that_cannot_be_used_leave_a_folder_that_works_and_are_never_passed_over_in_silence(
    host: Host, failing: str, count: int
) -> None:
    """The host still serves jobs; the worker, which sees that /scratch is no device of its own, says so again."""
    host.has_disks(*[INSTANCE_STORE] * count)
    host.failing = [failing]

    ended = host.boots()

    assert ended.exit_code == 1
    assert "FAILED" in ended.said
    assert "on the root volume" in ended.said
    assert host.mounted is None
    assert os.access(host.scratch, os.W_OK)
    assert stat.S_IMODE(host.scratch.stat().st_mode) == 0o1777
