"""What reaches a terminal is text, whoever wrote it."""

from __future__ import annotations

import pytest

from submitter.local_logs import event_of
from submitter.log_words import in_words
from submitter.output import Output, one_line, printable, reported_errors
from worker.contract.errors import ConfigError

EVIL = "a\x1b]0;title\x07b\x1b[2Jc\x9b31m\rd"


def test_control_characters_are_shown_and_not_sent() -> None:
    assert printable(EVIL) == "a\\x1b]0;title\\x07b\\x1b[2Jc\\x9b31m\\x0dd"
    assert printable("ä\t→\n✓") == "ä\t→\n✓"


def test_no_text_can_pass_for_a_line_of_its_own() -> None:
    assert one_line("reason\r\nerror: all is lost\u2028x") == "reason error: all is lost x"


def test_results_notes_and_errors_send_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(as_json=False)

    output.document({}, [EVIL])
    output.say(EVIL)
    output.note(EVIL)
    with pytest.raises(SystemExit), reported_errors(as_json=False):
        raise ConfigError(EVIL, hint=EVIL)

    captured = capsys.readouterr()
    shown = captured.out + captured.err
    assert shown.count("title") == 5
    assert not {"\x1b", "\x07", "\x9b", "\r"} & set(shown)


def test_a_log_line_of_a_worker_is_one_line_without_control_characters() -> None:
    event = event_of(
        b'{"ts":"2026-01-01T00:00:00Z","level":"error","event":"engine.lost","cause":"x\\u001b[2J\\nforged"}'
    )

    assert event
    assert in_words(event).endswith("engine lost: cause x\\x1b[2J forged")


@pytest.mark.parametrize(
    "line",
    [
        b'{"ts":"now","event":"of.another"}',
        b'{"ts":5,"event":"of.another"}',
        b'{"event":"of.another"}',
        b'{"ts":"2026-01-01T00:00:00Z","event":5}',
    ],
)
def test_lines_of_other_libraries_are_no_events(line: bytes) -> None:
    assert event_of(line) is None
