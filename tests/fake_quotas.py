"""Service Quotas as far as it is asked about EC2, with requests and answers held to botocore's service model."""

from __future__ import annotations

import functools

from botocore.loaders import Loader
from botocore.model import ServiceModel

from tests.fake_aws_server import ClientError, FakeService, Json, check_answer, check_request

_OPERATIONS = {"getservicequota": "GetServiceQuota", "getawsdefaultservicequota": "GetAWSDefaultServiceQuota"}


@functools.cache
def _model() -> ServiceModel:
    return ServiceModel(Loader().load_service_model("service-quotas", "service-2"))


class FakeQuotas(FakeService):
    """`applied` has the account's own values by code, `defaults` AWS's; a code in neither is no quota."""

    def __init__(self) -> None:
        super().__init__()
        self._model = _model()
        self.applied: dict[str, float] = {}
        self.defaults: dict[str, float] = {}

    def call(self, operation: str, request: Json, size_bytes: int) -> Json:  # noqa: ARG002  as the base class has it
        model = self._model.operation_model(_OPERATIONS[operation])
        assert model.input_shape
        assert model.output_shape
        check_request(model.input_shape, request)
        values = self.applied if operation == "getservicequota" else self.defaults
        code = request["QuotaCode"]
        if request["ServiceCode"] != "ec2" or code not in values:
            raise ClientError("there is no such quota", "NoSuchResourceException")
        answer = {"Quota": {"ServiceCode": "ec2", "QuotaCode": code, "Value": values[code], "Unit": "None"}}
        check_answer(model.output_shape, answer)
        return answer
