"""The vLLM connector. Load it with `kv_connector_module_path: pdx.vllm.connector`; nothing is imported here."""
