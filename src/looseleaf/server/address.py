"""The log fields of a server's address."""


def address_fields(host: str, port: int, threads: str | None) -> dict[str, str]:
    """The URL of a server that accepts connections, and its CPU threads, if known."""
    shown = f"[{host}]" if ":" in host else host
    fields = {} if threads is None else {"threads": threads}
    return {"url": f"http://{shown}:{port}/", **fields}
