"""What is wrong with one record. It becomes that record's output line; the run goes on."""

from __future__ import annotations

from worker.contract.output_line import Stage


class RecordError(Exception):
    """Why a record has no answer, in words that its owner can act on and without its text.

    `param` names the field at fault, as a path inside the request's body.
    """

    def __init__(self, stage: Stage, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.stage: Stage = stage
        self.code = code
        self.message = message
        self.param = param

    @property
    def kind(self) -> str:
        """As manifests count it, such as `length.prompt_too_long`."""
        return f"{self.stage}.{self.code}"
