"""Whether `/scratch` is what the job definitions take it for: a disk of its own, with room for weights and caches.

Where the host has mounted nothing there, Docker makes the folder on the root volume without a word. That works, slowly,
until the volume is full. So it is said at the start; nothing else comes of it.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from worker.contract.logs import log_event

MOUNTINFO = Path("/proc/self/mountinfo")
HINT = (
    "take hosts with local disks and mount those there before Docker starts, as a file system of their own with mode "
    "1777; otherwise model weights and caches fill the root volume"
)

_DOCKERS_OWN = ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf")
"""Docker mounts these into every container, from the disk that it keeps its own data on."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of the kernel's table of mounts: proc(5), mountinfo."""

    device: str
    """major:minor; 0 as major for what is on no disk."""
    root: str
    """The folder of the file system that is mounted; `/` if all of it is."""
    point: str
    file_system: str
    source: str

    @classmethod
    def of(cls, line: str) -> Self:
        """Read a line.

        Raises:
            ValueError: it is none.
        """
        head, _, tail = line.partition(" - ")
        _, _, device, root, point, *_ = head.split(" ")
        file_system, source, *_ = tail.split(" ")
        return cls(device, _plain(root), _plain(point), file_system, _plain(source))


def check_scratch(folder: Path, mountinfo: Path = MOUNTINFO) -> None:
    """Log what the folder stands on: `scratch.checked`, or `scratch.not_mounted` with a hint. Never fails."""
    try:
        # A path is bytes, and the kernel's table gives them as they are.
        lines = os.fsdecode(mountinfo.read_bytes()).split("\n")
        mounts = [Mount.of(line) for line in lines if line]
        mount = mount_of(folder.resolve(), mounts)
        space = os.statvfs(folder) if folder.is_dir() else None
    except (OSError, ValueError, RuntimeError) as error:  # the last is pathlib's for links in a circle
        cause = f"{type(error).__name__}: {error}"
        log_event(logger, logging.INFO, "scratch.unchecked", folder=folder, cause=cause)
        return
    fields = {
        "folder": folder,
        "device": mount.source,
        "file_system": mount.file_system,
        "size_bytes": space.f_frsize * space.f_blocks if space else 0,
        "free_bytes": space.f_frsize * space.f_bavail if space else 0,
    }
    fault = "there is no such folder" if space is None else fault_of(mount, mounts)
    if fault:
        message = f"check {folder}: {fault}"
        log_event(logger, logging.WARNING, "scratch.not_mounted", **fields, message=message, hint=HINT)
    elif not os.access(folder, os.W_OK | os.X_OK):
        message = f"check {folder}: user {os.geteuid()} may not write there"
        log_event(logger, logging.WARNING, "scratch.not_writable", **fields, message=message, hint=HINT)
    else:
        log_event(logger, logging.INFO, "scratch.checked", **fields)


def mount_of(folder: Path, mounts: Iterable[Mount]) -> Mount:
    """What a folder is on. Of mounts at one place the last is the one that is seen.

    Raises:
        ValueError: not even `/` is in the table.
    """
    holding = [mount for mount in mounts if folder.is_relative_to(mount.point)]
    return max(reversed(holding), key=lambda mount: len(Path(mount.point).parts))


def fault_of(mount: Mount, mounts: Iterable[Mount]) -> str | None:
    """Why a mount is no disk of its own; None if it is.

    A container's `/` is a layered file system with a device number of its own, so that being on another device than `/`
    proves nothing: a folder of the host's root volume is, too. What tells is which part of its file system is mounted.
    """
    by_point = {each.point: each for each in mounts}
    if mount.point == "/":
        return "nothing is mounted there; it is part of the root file system"
    if "/" in by_point and mount.device == by_point["/"].device:
        return f"it is on the same device as / ({mount.source})"
    if mount.root == "/":
        return None
    dockers = {by_point[point].device for point in _DOCKERS_OWN if point in by_point}
    on_disks = {device for device in dockers if not device.startswith("0:")}
    if on_disks and mount.device not in on_disks:
        return None
    return f"it is no file system of its own, but the folder {mount.root} of {mount.source}"


def _plain(field: str) -> str:
    """Undo the kernel's octal for blanks and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)
