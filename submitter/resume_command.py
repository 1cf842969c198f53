"""The command that goes on with a run where its last submission was made."""

from __future__ import annotations

from submitter.batch_records import Patience, Records
from submitter.planned_run import PlannedRun
from worker.contract.submission import Submission


def resume_command(run_uri: str, last: Submission | None) -> str:
    """The same by the run's last submission, or None of a run that was only planned."""
    if last is None:
        return f"submit resume {run_uri} --queue … --job-definition …, or with --local"
    return f"submit resume {run_uri}" + (" --local" if last.target == "local" else "")


def resume_command_of(run: PlannedRun) -> str:
    """The same, having looked at the run's submissions."""
    records = Records(store=run.store, layout=run.layout, patience=Patience())
    ids = records.ids()
    return resume_command(run.layout.run_uri, records.read(ids[-1]).submission if ids else None)
