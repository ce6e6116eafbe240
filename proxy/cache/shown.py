"""Outcomes of verbs as JSON: objects by their fields, bytes in hex, jobs by the names that they have across nodes."""

from __future__ import annotations

from typing import Any

import msgspec

from pdx.errors import JobUnknown
from pdx.wire.base import Message
from pdx.wire.verbs import JobId, JobStatus

_MAX_JOB = 1024  # characters


def shown(value: Any, instance: str) -> Any:
    """What the node `instance` said, as plain data."""
    if isinstance(value, msgspec.Struct):
        fields = {name: shown(getattr(value, name), instance) for name in value.__struct_fields__}
        if isinstance(value, JobStatus) and value.job:
            fields["job"] = job_name(instance, value.job)
        return {"type": type(value).__name__, **fields} if isinstance(value, Message) else fields
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (list, tuple)):
        return [shown(each, instance) for each in value]
    if isinstance(value, dict):
        return {name: shown(each, instance) for name, each in value.items()}
    return value


def job_name(instance: str, job: str) -> str:
    """What a node's job is called by who knows several nodes."""
    return f"{instance}:{job}"


def split_job(name: str) -> tuple[str, str]:
    """The node, and what it calls the job.

    :raises JobUnknown: that is no job's name.
    """
    instance, _, job = name[:_MAX_JOB].rpartition(":")
    try:
        msgspec.convert(job, JobId)
    except msgspec.ValidationError:
        job = ""
    if not instance or not job:
        raise JobUnknown(f"{name!r:.80} is no job's name, which is NODE:EPOCH-NUMBER; /cache/jobs lists them")
    return instance, job
