"""Why a connection did not come up, from what gRPC says of it."""

#: Part of gRPC's text → reason, what it means.
_MEANINGS = (
    (
        "CERTIFICATE_VERIFY_FAILED",
        "SERVER_NOT_TRUSTED",
        "the server's certificate does not come from a CA that is trusted here (--tls-ca)",
    ),
    (
        "Hostname Verification Check failed",
        "SERVER_NAME_MISMATCH",
        "the server's certificate has another name than its host, role or --tls-server-name",
    ),
    (
        "WRONG_VERSION_NUMBER",
        "SERVER_WITHOUT_TLS",
        "TLS was begun and the server speaks plain text",
    ),
)
#: A server tells nothing to a client that begins without TLS, or shows no certificate it accepts.
_CLOSED = ("Socket closed", "Connection reset")
_NOT_CONNECTED = "failed to connect to all addresses"


def connection_failure(details: str) -> tuple[str, str] | None:
    """Reason and message of a failed TLS handshake; None for whatever else made a call fail.

    Args:
        details: gRPC's own text of an UNAVAILABLE.
    """
    if _NOT_CONNECTED not in details:
        return None
    for text, reason, meaning in _MEANINGS:
        if text in details:
            return reason, f"{meaning}; {details}"
    if any(text in details for text in _CLOSED):
        return (
            "CONNECTION_REFUSED_BY_SERVER",
            "the server closed the connection before any call: it may speak TLS, or ask for a "
            f"certificate that it trusts (--tls-certificate, --tls-key); {details}",
        )
    return None
