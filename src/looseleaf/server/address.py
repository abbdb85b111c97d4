"""The log fields of a server's address."""


def address_fields(
    host: str, port: int, threads: str | None, *, encrypted: bool = False
) -> dict[str, str]:
    """The URL of a server that accepts connections, and its CPU threads, if known."""
    scheme = "https" if encrypted else "http"
    shown = f"[{host}]" if ":" in host else host
    fields = {} if threads is None else {"threads": threads}
    return {"url": f"{scheme}://{shown}:{port}/", **fields}
