"""The calls to AWS that code makes, read from its source, and the permissions that each needs."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import botocore.session
from botocore import xform_name

SERVICES = ("batch", "cloudwatch", "ecr", "iam", "logs", "s3", "secretsmanager", "service-quotas", "sts")
"""Those whose operations are looked for. One of another service would need a client, which a test looks for, too."""

MANAGED = {
    "copy": {"s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"},
    "download_file": {"s3:GetObject"},
    "download_fileobj": {"s3:GetObject"},
    "upload_file": {"s3:PutObject", "s3:AbortMultipartUpload"},
    "upload_fileobj": {"s3:PutObject", "s3:AbortMultipartUpload"},
}
"""What boto3 adds to S3's own operations; only of receivers that are clients, since others have such methods, too."""

PERMISSIONS: dict[str, set[str]] = {
    "abort_multipart_upload": {"s3:AbortMultipartUpload"},
    "complete_multipart_upload": {"s3:PutObject"},
    "create_multipart_upload": {"s3:PutObject"},
    "delete_object": {"s3:DeleteObject"},
    "delete_object VersionId": {"s3:DeleteObjectVersion"},
    "describe_compute_environments": {"batch:DescribeComputeEnvironments"},
    "describe_images": {"ecr:DescribeImages"},
    "describe_job_definitions": {"batch:DescribeJobDefinitions"},
    "describe_job_queues": {"batch:DescribeJobQueues"},
    "describe_jobs": {"batch:DescribeJobs"},
    "describe_log_groups": {"logs:DescribeLogGroups"},
    "get_aws_default_service_quota": {"servicequotas:GetAWSDefaultServiceQuota"},
    "get_bucket_encryption": {"s3:GetEncryptionConfiguration"},
    "get_bucket_lifecycle_configuration": {"s3:GetLifecycleConfiguration"},
    # Answers everybody.
    "get_caller_identity": set(),
    "get_job_queue_snapshot": {"batch:GetJobQueueSnapshot"},
    "get_log_events": {"logs:GetLogEvents"},
    "get_object": {"s3:GetObject"},
    "get_public_access_block": {"s3:GetBucketPublicAccessBlock"},
    "get_service_quota": {"servicequotas:GetServiceQuota"},
    "head_bucket": {"s3:ListBucket"},
    # Without s3:ListBucket a missing object is 403 rather than 404.
    "head_object": {"s3:GetObject", "s3:ListBucket"},
    "list_jobs": {"batch:ListJobs"},
    "list_object_versions": {"s3:ListBucketVersions"},
    "list_objects_v2": {"s3:ListBucket"},
    "put_object": {"s3:PutObject"},
    "put_object Tagging": {"s3:PutObjectTagging"},
    "register_job_definition": {"batch:RegisterJobDefinition", "iam:PassRole"},
    # With tags, which every submission has.
    "submit_job": {"batch:SubmitJob", "batch:TagResource"},
    "terminate_job": {"batch:TerminateJob"},
    "upload_part": {"s3:PutObject"},
    "upload_part_copy": {"s3:GetObject", "s3:PutObject"},
}
"""By operation, as boto3 spells it; by operation and argument where the argument needs more."""

_BY_ARGUMENT = {name.split(" ")[1]: name for name in PERMISSIONS if " " in name}


def calls_in(path: Path) -> Iterator[tuple[str, int]]:
    """Operations, or operations with an argument that needs more, and the line of each.

    An operation counts by its name, whatever it is called on: clients have many names. A paginator counts as its operation.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            if node.attr in operations() or (node.attr in MANAGED and "client" in ast.unparse(node.value).lower()):
                yield node.attr, node.lineno
        elif isinstance(node, ast.Call):
            yield from _calls(node)


def clients_in(path: Path) -> Iterator[str]:
    """The services of which clients are made by `….client("service")` or `….resource("service")`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr in ("client", "resource") and node.args:
            yield ast.unparse(node.args[0]).strip("'")


def needed(operations_used: set[str]) -> set[str]:
    return {action for name in operations_used for action in (PERMISSIONS | MANAGED)[name]}


@functools.cache
def operations() -> frozenset[str]:
    session = botocore.session.get_session()
    return frozenset(
        xform_name(name) for service in SERVICES for name in session.get_service_model(service).operation_names
    )


def _calls(node: ast.Call) -> Iterator[tuple[str, int]]:
    words = [part.value for part in node.args if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    if isinstance(node.func, ast.Attribute) and node.func.attr in ("get_paginator", "get_waiter"):
        yield words[0], node.lineno
    for keyword in node.keywords:
        if keyword.arg in _BY_ARGUMENT:
            yield _BY_ARGUMENT[keyword.arg], node.lineno
