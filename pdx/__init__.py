"""PDX: moves the KV cache of LLM engines between processes, hosts and tiers as chunks.

`pdx.connect()` is the Python API; everything else is reached through the `pdx` command or `pdx.vllm`.
"""

from pdx.client.api import Node, connect
from pdx.errors import PdxError

__all__ = ["Node", "PdxError", "connect"]
