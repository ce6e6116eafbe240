"""PDX: moves the KV cache of LLM engines between processes, hosts and tiers as chunks.

`pdx.connect()` and `pdx.Controller` are the Python API; everything else is reached through the `pdx` command or
`pdx.vllm`.
"""

from typing import TYPE_CHECKING, Any

from pdx.errors import PdxError

if TYPE_CHECKING:
    from pdx.client.api import Node, connect

__all__ = ["Controller", "Node", "PdxError", "Prompt", "__version__", "connect"]


def __getattr__(name: str) -> Any:
    """What not everybody needs is imported when it is used."""
    if name in ("Node", "connect"):
        from pdx.client import api

        return getattr(api, name)
    if name == "Controller":
        from pdx.client.controller import Controller

        return Controller
    if name == "Prompt":
        from pdx.wire.prompt import Prompt

        return Prompt
    if name == "__version__":
        from pdx.extras import own_version

        return own_version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
