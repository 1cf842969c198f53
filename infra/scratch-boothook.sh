#!/bin/bash
# Makes the host's NVMe disks one volume at /scratch, before Docker starts. cloud-init runs it at every boot.
#
# Without such disks, or where they cannot be used, /scratch is a folder of the root volume: jobs run, the console's log says so here, and
# each worker says so again (scratch.not_mounted). Exit 0: as it should be; 1: there are disks, and they are not used.
set -uo pipefail

# cloud-init gives no argument.
readonly scratch=${1:-/scratch}
readonly label=scratch
readonly array=/dev/md/scratch

say() {
  echo "scratch: $*" >&2
}

instance_disks() {
  # EBS volumes are NVMe devices too, and the numbers of both change from boot to boot: the model tells them apart.
  lsblk --nodeps --noheadings --paths --output NAME,MODEL | awk '/Amazon EC2 NVMe Instance Storage/ {print $1}'
}

labelled_volume() {
  blkid --label "$label"
}

with_mdadm() {
  command -v mdadm >/dev/null || timeout 120 dnf --quiet --assumeyes install mdadm >&2
}

make_volume() {
  local device=$1
  mkfs.xfs -q -f -K -L "$label" "$device" >&2
}

stripe() {
  {
    # What is left of an array that never got a file system would hold the disks.
    mdadm --stop --scan
    mdadm --zero-superblock --force "$@"
    mdadm --create "$array" --run --homehost=any --name="$label" --level=0 --raid-devices=$# "$@"
  } >&2
}

volume_of() {
  if [ $# -gt 1 ]; then
    if with_mdadm; then
      # After a reboot the array is there under whatever name the kernel gave it, or not yet put together.
      labelled_volume || { mdadm --assemble --scan >&2 && labelled_volume; } && return
      stripe "$@" && make_volume "$array" && echo "$array" && return
    fi
    say "no RAID 0 over $# disks: using $1 alone"
    mdadm --stop "$array" >&2
  else
    labelled_volume && return
  fi
  make_volume "$1" && echo "$1"
}

main() {
  mkdir -p "$scratch"
  if mountpoint -q "$scratch"; then
    return 0
  fi
  local disks volume
  mapfile -t disks < <(instance_disks)
  if [ ${#disks[@]} -eq 0 ]; then
    say "this host has no NVMe disks of its own: $scratch is on the root volume"
    chmod 1777 "$scratch"
    return 0
  fi
  if volume=$(volume_of "${disks[@]}") && mount -t xfs -o noatime,nodev,nosuid "$volume" "$scratch"; then
    say "$volume of ${#disks[@]} disk(s) is mounted at $scratch"
    chmod 1777 "$scratch"
    return 0
  fi
  say "FAILED to use ${disks[*]}: $scratch is on the root volume"
  chmod 1777 "$scratch"
  return 1
}

main
