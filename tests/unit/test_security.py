"""What SECURITY.md says of the code itself, held to the code."""

from __future__ import annotations

import ast
import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import worker.engine  # noqa: F401  what its import does to vLLM's logs is looked at
from worker.contract.engine_code import ALLOW_VARIABLE, check_code_args, code_args
from worker.contract.errors import ConfigError, UsageError
from worker.contract.logs import JsonFormatter, trace_of
from worker.contract.media_allowed import read_allowed_media
from worker.contract.plan import RequestSettings
from worker.contract.record_errors import RecordError
from worker.engine_log import DUMP_LOGGER, last_words
from worker.media_fetch import ImageSource
from worker.records import RecordReader

ROOT = Path(__file__).parents[2]
CODE = sorted([*(ROOT / "worker").rglob("*.py"), *(ROOT / "submitter").rglob("*.py")])
PROMPT = "the patient said"

# Nothing is a shell command


def test_no_code_starts_a_shell_or_runs_what_is_data() -> None:
    found = {path.name: dangers_in(path.read_text(encoding="utf-8")) for path in CODE}

    assert {name: dangers for name, dangers in found.items() if dangers} == {}


@pytest.mark.parametrize(
    "code", ["subprocess.run('ls', shell=True)", "os.system('ls')", "eval('1')", "pickle.loads(b'')", "run(shell=x)"]
)
def test_the_search_for_shells_finds_them(code: str) -> None:
    assert dangers_in(code)


FORBIDDEN = frozenset(
    {
        "compile",
        "eval",
        "exec",
        "marshal.loads",
        "os.popen",
        "os.system",
        "pickle.load",
        "pickle.loads",
        "subprocess.getoutput",
        "subprocess.getstatusoutput",
        "yaml.load",
    }
)


def dangers_in(source: str) -> list[str]:
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    names = [ast.unparse(call.func) for call in calls]
    shells = [keyword.arg for call in calls for keyword in call.keywords if keyword.arg == "shell"]
    return [*FORBIDDEN.intersection(names), *shells]


# Code comes from vLLM alone


@pytest.mark.parametrize(
    "engine_args",
    [
        {"trust_remote_code": True},
        {"trust_remote_code": "true"},
        {"worker_cls": "evil.Worker"},
        {"worker_extension_cls": "evil.Extension"},
        {"scheduler_cls": "evil.Scheduler"},
        {"logits_processors": ["evil:Processor"]},
        {"reasoning_parser_plugin": "/scratch/evil.py"},
        {"tool_parser_plugin": "/scratch/evil.py"},
        {"io_processor_plugin": "evil"},
        {"log_config_file": "/scratch/log.json"},
        {"logging_config": {"handlers": {}, "version": 1}},
        {"model_class_overrides": {"LlamaForCausalLM": "evil:Model"}},
        {"distributed_executor_backend": "evil.Executor"},
        {"compilation_config": {"backend": "evil.backend"}},
        {"compilation_config": {"inductor_passes": {"post": "evil.passes.one"}}},
        {"kv_transfer_config": {"kv_connector": "X", "kv_connector_module_path": "evil.connector"}},
        {"kv_transfer_config": {"kv_connector": "X", "kv_connector_module_path": "evil"}},
        {"ec_manager_config": {"encoder_cache_manager_cls": "evil"}},
        {"structured_outputs_config": {"reasoning_parser_plugin": "/scratch/evil.py"}},
        {"speculative_config": {"draft": [{"trust_remote_code": True}]}},
        {"speculative_config": {"method": "custom_class", "model": "evil.Proposer"}},
        {"ec_manager_config": {"encoder_cache_manager_cls": "evil.Manager"}},
    ],
)
def test_an_argument_that_brings_code_needs_the_environments_word(engine_args: dict[str, Any]) -> None:
    (name,) = engine_args

    assert code_args(engine_args) == [name]
    for environment in ({}, {ALLOW_VARIABLE: "0"}, {ALLOW_VARIABLE: ""}):
        with pytest.raises(ConfigError, match=name):
            check_code_args(engine_args, environment)
    check_code_args(engine_args, {ALLOW_VARIABLE: "1"})


@pytest.mark.parametrize(
    "engine_args",
    [
        {},
        {"trust_remote_code": False, "worker_cls": "auto", "worker_extension_cls": "", "logits_processors": None},
        {"max_model_len": 4096, "dtype": "float32", "quantization": "fp8", "distributed_executor_backend": "mp"},
        {"compilation_config": {"level": 3, "splitting_ops": ["vllm.unified_attention"]}},
        {"hf_overrides": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "tool_call_parser": "hermes"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    ],
)
def test_an_argument_that_brings_none_needs_no_word(engine_args: dict[str, Any]) -> None:
    check_code_args(engine_args, {})


def test_nothing_but_the_users_own_argument_turns_remote_code_on() -> None:
    naming = {path.name for path in CODE if "trust_remote_code" in path.read_text(encoding="utf-8")}

    # A list of names that arguments may have, and what needs the environment's leave.
    assert naming == {"engine_arg_names.py", "engine_code.py"}


@pytest.mark.parametrize(
    "field",
    [
        {"trust_remote_code": True},
        {"mm_processor_kwargs": {"trust_remote_code": True}},
        {"chat_template": "{{ cycler.__init__.__globals__ }}"},
        {"prompt_embeds": "AAAA"},
        {"vllm_xargs": {"x": 1}},
        {"kv_transfer_params": {"x": 1}},
    ],
)
def test_no_field_of_a_record_reaches_what_loads_code(field: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], **field}
    openai = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}

    with pytest.raises(RecordError):
        reader("openai").read(json.dumps(openai).encode())
    with_plain = reader("plain")
    try:
        found = with_plain.read(json.dumps(body).encode()).body
    except RecordError:
        return
    assert not field.keys() & found.keys()


def reader(shape: Any) -> RecordReader:
    return RecordReader(shape, "response", {}, RequestSettings(), {"m"})


def test_vllm_trusts_no_remote_code_and_loads_weights_as_data_by_itself() -> None:
    """Read from its own files: importing it takes seconds."""
    package = vllm_folder()

    assert "trust_remote_code: bool = False" in (package / "config" / "model.py").read_text()
    loads = [
        node
        for path in (
            package / "model_executor" / "model_loader" / "weight_utils.py",
            package / "lora" / "lora_model.py",
        )
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert loads
    for node in loads:
        assert {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}["weights_only"] == "True"


def vllm_folder() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec
    assert spec.origin
    return Path(spec.origin).parent


# Records lead nowhere

METADATA_FORMS = (
    "http://169.254.169.254/",
    "http://169.254.169.254./",
    "http://2852039166/",
    "http://0xa9fea9fe/",
    "http://0xa9.0xfe.0xa9.0xfe/",
    "http://0251.0376.0251.0376/",
    "http://169.254.43518/",
    "http://[::ffff:169.254.169.254]/",
    "http://[::ffff:a9fe:a9fe]/",
    "http://[64:ff9b::a9fe:a9fe]/",
    "http://[fd00:ec2::254]/",
    "http://169.254.170.2/v2/credentials/",
    "http://169.254.170.23/",
)


@pytest.mark.parametrize("url", METADATA_FORMS)
def test_a_record_does_not_reach_the_metadata_service_by_any_name_of_it(url: str) -> None:
    """Not where other hosts are allowed, and not where the very name is: it must not be, or leads nowhere."""
    host = url.removeprefix("http://").partition("/")[0]

    assert refusal(["images.example.com", "s3://bucket"], url) == "media_not_allowed"
    for entry in (host, f"{host}:80", f"http://{host}"):
        try:
            read_allowed_media([entry])
        except UsageError:
            continue
        assert refusal([entry], url) == "media_not_allowed"


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "FILE:///etc/passwd",
        "file://localhost/etc/passwd",
        "/etc/passwd",
        "ftp://images.example.com/a",
        "gopher://images.example.com/",
        "http://images.example.com@169.254.169.254/",
        "http://169.254.169.254\\@images.example.com/",
        "http://169.254.169.254%2f@images.example.com/",
        "http:169.254.169.254/",
        "http:///169.254.169.254/",
        "http://images.example.com\t@169.254.169.254/",
        "http://169.254.169.254/images.example.com/",
        "http://169.254.169.254#@images.example.com/",
        "http://169.254.169.254?images.example.com",
        "s3://other/key",
        "s3://bucket-other/key",
        "s3://bucket/../other/key",
    ],
)
def test_a_record_reads_no_file_and_no_place_beside_the_allowed_ones(url: str) -> None:
    assert refusal(["images.example.com", "s3://bucket/images"], url) in ("invalid_media", "media_not_allowed")


def refusal(allowed: list[str], url: str) -> str:
    source = ImageSource(read_allowed_media(allowed), timeout_s=5.0, max_bytes=1)
    with pytest.raises(RecordError) as caught:
        source.read(url)
    return caught.value.code


def test_an_engine_unpacks_no_image_beyond_the_bound() -> None:
    """Where vLLM looks for it, before it is imported."""
    code = (
        "import os; from worker.engine_environment import MAX_IMAGE_PIXELS, prepare_environment;"
        "prepare_environment('m', {}); assert os.environ['VLLM_MAX_IMAGE_PIXELS'] == str(MAX_IMAGE_PIXELS)"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}

    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)
    assert "envs.VLLM_MAX_IMAGE_PIXELS" in (vllm_folder() / "multimodal" / "media" / "image.py").read_text()


# Logs


def test_a_bug_is_logged_by_where_it_is_and_not_by_what_it_says() -> None:
    def fail() -> None:
        try:
            os.environ[PROMPT]
        except KeyError as error:
            raise ValueError(f"bad record {PROMPT!r}") from error

    try:
        fail()
    except ValueError:
        record = logging.LogRecord("worker", logging.ERROR, __file__, 1, "worker.failed", (), sys.exc_info())
    logged = json.loads(JsonFormatter({}).format(record))

    assert PROMPT not in json.dumps(logged)
    assert "in fail" in logged["traceback"]
    assert "ValueError\ncaused by Traceback" in logged["traceback"]
    assert logged["traceback"].endswith("KeyError")


def test_a_circle_of_causes_ends() -> None:
    first, second = ValueError(), TypeError()
    first.__cause__, second.__cause__ = second, first

    assert trace_of(first).count("Traceback") == 2


@pytest.mark.parametrize(
    ("error", "is_said"),
    [
        (RuntimeError(f"cannot compile grammar {PROMPT}"), False),
        (KeyError(PROMPT), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (OSError(28, "No space left on device"), True),
        (MemoryError("cannot allocate"), True),
    ],
)
def test_an_engine_that_dies_says_what_the_machine_has_and_nothing_of_a_record(error: Exception, is_said: bool) -> None:
    words = last_words(error)

    assert (" ".join(str(error).split()) in words) is is_said
    assert type(error).__qualname__ in words


def test_vllms_dump_of_a_failed_steps_records_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger(DUMP_LOGGER).error("Dumping scheduler output: %s", PROMPT)

    assert caplog.records == []
    dumps = (vllm_folder().joinpath(*DUMP_LOGGER.split(".")[1:])).with_suffix(".py").read_text()
    assert "logger = init_logger(__name__)" in dumps
    assert "Dumping scheduler output" in dumps


# The document


def test_every_test_that_security_md_names_is_there() -> None:
    document = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", document)

    assert len(named) > 30
    missing = [f"{path}::{name}" for path, name in named if not is_there(ROOT / path, name)]
    assert missing == []


def is_there(path: Path, name: str) -> bool:
    return path.is_file() and (not name or f"def {name}(" in path.read_text(encoding="utf-8"))
