"""The bucket and the image repository: closed, tidy, and never gone with results in them."""

from __future__ import annotations

import json

from infra.render import CHECKPOINT_TAG, CHECKPOINT_TAG_VARIABLE
from tests.infra.stack import ATTRIBUTES, EVERYTHING, Stack


def test_the_bucket_is_encrypted_and_closed_to_the_public() -> None:
    bucket = Stack().properties("Bucket")

    (rule,) = bucket["BucketEncryption"]["ServerSideEncryptionConfiguration"]
    assert rule["ServerSideEncryptionByDefault"]["SSEAlgorithm"] == "AES256"
    assert bucket["PublicAccessBlockConfiguration"] == dict.fromkeys(
        ["BlockPublicAcls", "BlockPublicPolicy", "IgnorePublicAcls", "RestrictPublicBuckets"], True
    )
    assert bucket["OwnershipControls"] == {"Rules": [{"ObjectOwnership": "BucketOwnerEnforced"}]}


def test_the_bucket_refuses_everything_that_does_not_come_by_tls() -> None:
    (statement,) = Stack().properties("BucketPolicy")["PolicyDocument"]["Statement"]

    assert (statement["Effect"], statement["Principal"], statement["Action"]) == ("Deny", "*", "s3:*")
    assert statement["Resource"] == [ATTRIBUTES["Bucket.Arn"], f"{ATTRIBUTES['Bucket.Arn']}/*"]
    assert statement["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}


def test_what_is_left_behind_in_the_bucket_is_removed() -> None:
    stack = Stack(UnfinishedUploadDays=3, CheckpointDays=9)
    rules = {rule["Id"]: rule for rule in stack.properties("Bucket")["LifecycleConfiguration"]["Rules"]}

    assert {rule["Status"] for rule in rules.values()} == {"Enabled"}
    assert rules["unfinished-uploads"]["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": "3"}
    assert rules["checkpoints"]["ExpirationInDays"] == "9"
    assert rules["old-versions"]["NoncurrentVersionExpiration"] == {"NoncurrentDays": 30}
    # Nothing else expires: outputs are what a run is for.
    assert [name for name, rule in rules.items() if "ExpirationInDays" in rule] == ["checkpoints"]


def test_the_rule_for_checkpoints_knows_them_by_the_tag_that_the_stacks_workers_give_them() -> None:
    stack = Stack()
    (rule,) = [
        rule for rule in stack.properties("Bucket")["LifecycleConfiguration"]["Rules"] if rule["Id"] == "checkpoints"
    ]

    assert [f"{tag['Key']}={tag['Value']}" for tag in rule["TagFilters"]] == [CHECKPOINT_TAG]
    for definition in stack.of_type("Batch::JobDefinition").values():
        environment = {entry["Name"]: entry["Value"] for entry in definition["ContainerProperties"]["Environment"]}
        assert environment[CHECKPOINT_TAG_VARIABLE] == CHECKPOINT_TAG


def test_versions_are_kept_only_if_asked_for() -> None:
    """Suspended is not the same as never enabled: each removal would leave a marker that holds the bucket."""
    assert "VersioningConfiguration" not in Stack().properties("Bucket")
    assert Stack(Versioning="yes").properties("Bucket")["VersioningConfiguration"] == {"Status": "Enabled"}


def test_markers_of_deleted_objects_go_once_nothing_is_behind_them() -> None:
    """By a rule of its own: S3 takes it together with neither days nor tags."""
    (rule,) = [
        rule
        for rule in Stack().properties("Bucket")["LifecycleConfiguration"]["Rules"]
        if "ExpiredObjectDeleteMarker" in rule
    ]

    assert rule == {"Id": "delete-markers", "Status": "Enabled", "ExpiredObjectDeleteMarker": True}


def test_results_are_never_deleted_with_the_stack_and_nothing_is_left_behind_unseen() -> None:
    resources = Stack(**EVERYTHING).resources

    assert {name: found["DeletionPolicy"] for name, found in resources.items() if "DeletionPolicy" in found} == {
        "Bucket": "Delete",
        "LogGroup": "Delete",
        "Repository": "Delete",
    }
    assert {found["UpdateReplacePolicy"] for found in resources.values() if "DeletionPolicy" in found} == {"Retain"}
    assert resources["Repository"]["Properties"]["EmptyOnDelete"] is True


def test_images_are_scanned_and_a_tag_never_becomes_another_image() -> None:
    """Hosts keep what they have pulled."""
    repository = Stack().properties("Repository")
    rules = json.loads(repository["LifecyclePolicy"]["LifecyclePolicyText"])["rules"]

    assert repository["ImageScanningConfiguration"] == {"ScanOnPush": True}
    assert repository["ImageTagMutability"] == "IMMUTABLE"
    assert [rule["selection"]["tagStatus"] for rule in rules] == ["untagged", "any"]
