"""A planned run on this machine: which partitions are left, the workers that do them, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from submitter.batch_records import Patience, Records
from submitter.job_definition import DEFAULT_RETRY_RULES, RetryRules, retry_rules
from submitter.limits import job_name_of
from submitter.local import ChildEnd, LocalOptions, run_children
from submitter.local_logs import log_folder_of
from submitter.local_presence import GoingOnError, held
from submitter.model_source import check_is_here
from submitter.output import Output, count, duration, kinds_of_errors
from submitter.planned_run import Outputs, PlannedRun
from submitter.progress import LocalProgress, progress_bar
from submitter.resume_command import resume_command_of
from submitter.run_accounts import Account
from submitter.stage import open_before
from worker.contract.errors import ConfigError, ExitCode
from worker.contract.manifest import Manifest
from worker.contract.submission import Submission, ranges_of


class LocalRun:
    """A planned run whose partitions are worked on here."""

    def __init__(self, run: PlannedRun, output: Output) -> None:
        self._run = run
        self._plan = run.plan
        self._output = output
        self.started_count = 0
        """Partitions that `finish` had to run."""
        self.held_count = 0
        """Partitions that it could not, since the run before has not done them."""
        self.spared_count = 0
        """Partitions that were not started, since a worker's failure was not for its own partition's sake."""

    def finish(self, parallel: int, rules: RetryRules, environment: Mapping[str, str]) -> list[ChildEnd]:
        """Run the partitions that have no output yet, with more variables for the workers; gives those that failed.

        Raises:
            GoingOnError: another command does that here.
            InputError: the model is a path, and not here.
            InterruptedRunError: as `run_children`.
        """
        log_folder = log_folder_of(self._run)
        log_folder.mkdir(parents=True, exist_ok=True)
        with held(log_folder) as is_alone:
            # What another command has done before it let go of the folder is listed.
            done, remaining = self._look()
            if not remaining:
                if not self.held_count:
                    self._output.note("every partition has its output already: nothing to run")
                return []
            if not is_alone:
                raise GoingOnError(self._run.layout.run_uri, log_folder)
            check_is_here(self._plan.model)
            options = LocalOptions(
                parallel=parallel,
                retry_rules=rules,
                log_folder=log_folder,
                environment=environment,
                is_proven=bool(done),
            )
            return self._work(done, remaining, options)

    def _look(self) -> tuple[set[int], list[int]]:
        """Partitions that are done, and those to run."""
        outputs = self._run.outputs()
        done = {index for index in outputs.by_index if self._manifest(index)}
        # A worker that finds an output without its manifest, or another plan's, sees to it without starting an engine.
        remaining = self._without_held(
            [index for index in range(len(self._plan.partitions)) if index not in done], outputs
        )
        return done, remaining

    def _work(self, done: set[int], remaining: list[int], options: LocalOptions) -> list[ChildEnd]:
        self.started_count = len(remaining)
        submission = self._new_submission(remaining)
        with progress_bar("run", "records") as show:
            progress = LocalProgress(
                partition_count=len(self._plan.partitions),
                record_count=self._plan.record_count,
                show=show,
                say=self._output.note,
                finished_partitions=len(done),
                finished_records=sum(self._plan.partitions[index].record_count for index in done),
            )
            ends = run_children(
                self._run.layout.run_uri, submission, len(self._plan.partitions), options, progress.report
            )
        self.spared_count = len(remaining) - len(ends)
        return [end for end in ends if end.exit_code]

    def exit_code_of(self, failed: list[ChildEnd]) -> int:
        """What a command says whose children ended so."""
        return exit_code_of(failed) or (ExitCode.INTERRUPTED if self.held_count else ExitCode.OK)

    def _without_held(self, remaining: list[int], outputs: Outputs) -> list[int]:
        after = self._plan.after
        if after is None:
            return remaining
        before = open_before(after)
        ready = before.outputs().by_index.keys() | outputs.by_index.keys()
        found = [index for index in remaining if index in ready]
        self.held_count = len(remaining) - len(found)
        if self.held_count:
            self._output.note(
                f"{count(self.held_count, 'partition')} not run: {after.run_uri} has not done them; "
                f"{resume_command_of(before)}, then submit resume {self._run.layout.run_uri} --local"
            )
        return found

    def summary(self, failed: list[ChildEnd], elapsed_s: float) -> tuple[dict[str, Any], list[str]]:
        done = sorted(self._run.outputs().by_index)
        account = Account.total(Account.of(found) for index in done if (found := self._manifest(index)))
        tokens, generate_s = account.tokens, account.generate_s
        document = {
            "partition_done_count": len(done),
            "ok_count": account.ok_count,
            "error_count": account.error_count,
            "error_counts": dict(account.error_counts),
            "prompt_tokens": tokens.prompt_tokens,
            "completion_tokens": tokens.completion_tokens,
            "generate_s": generate_s,
            "elapsed_s": elapsed_s,
            "outputs": self._run.layout.outputs,
            "partition_not_started_count": self.spared_count,
            "failed": [
                {
                    "partition_index": end.partition_index,
                    "exit_code": end.exit_code,
                    "message": end.message,
                    "log": str(end.log_path),
                    "engine_log": str(end.engine_log_path),
                }
                for end in failed
            ],
        }
        # The seconds are those of the last attempts, and the tokens of all.
        knows_rate = generate_s and not account.cut_short
        rate = f", {tokens.completion_tokens / generate_s:,.0f} tokens/s while generating" if knows_rate else ""
        lines = [
            (
                f"{count(account.ok_count, 'record')} answered, {count(account.error_count, 'error')}, {len(done):,} of "
                f"{count(len(self._plan.partitions), 'partition')} done in {duration(elapsed_s)}"
            ),
            *([f"errors: {kinds_of_errors(account.error_counts)}"] if account.error_counts else []),
            f"{tokens.completion_tokens:,} output tokens{rate}",
            f"outputs: {self._run.layout.outputs}",
            *(
                f"partition {end.partition_index} failed with exit code {end.exit_code}: {end.message or 'no reason given'}; "
                f"its logs: {end.log_path}, {end.engine_log_path}"
                for end in failed
            ),
            *(
                [f"{count(self.spared_count, 'partition')} not started: the same was to come of them"]
                if self.spared_count
                else []
            ),
        ]
        return document, lines

    def _manifest(self, index: int) -> Manifest | None:
        """The manifest of a partition, if it has one that is of this plan."""
        manifest = self._run.manifest(index)
        return manifest if manifest and manifest.fingerprint == self._plan.fingerprint else None

    def _new_submission(self, indices: list[int]) -> Submission:
        records = Records(store=self._run.store, layout=self._run.layout, patience=Patience())
        while True:
            submission_id = records.next_id()
            submission = Submission(
                submission_id=submission_id,
                created_at=records.timestamp(),
                target="local",
                job_name=job_name_of(self._plan.run_id, submission_id),
                job_queue=None,
                job_definition=None,
                partition_ranges=ranges_of(indices),
            )
            if records.create(submission):
                return submission


def local_rules(job_definition: str | None, output: Output) -> RetryRules:
    """The retry rules of a job definition file, or this project's own.

    Raises:
        ConfigError: the file cannot be read as a job definition.
    """
    if job_definition is None:
        return DEFAULT_RETRY_RULES
    try:
        definition = json.loads(Path(job_definition).read_text(encoding="utf-8"))
        if not isinstance(definition, dict) or not isinstance(definition.get("retryStrategy", {}), dict):
            raise ConfigError(f"read job definition {job_definition}: it is none (expected an object, as AWS takes it)")
        return retry_rules(definition)
    except FileNotFoundError:
        output.note(f"--job-definition {job_definition} is no file: this project's own retry rules hold here")
        return DEFAULT_RETRY_RULES
    except (OSError, ValueError) as error:
        raise ConfigError(f"read job definition {job_definition}: {error}") from error


def exit_code_of(failed: list[ChildEnd]) -> int:
    """What a command says whose children ended so: the first failure's own code."""
    known = set(ExitCode)
    return next((end.exit_code if end.exit_code in known else ExitCode.ENGINES_DIED for end in failed), ExitCode.OK)
