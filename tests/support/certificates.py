"""Certificates of a made-up CA, as files that can be replaced while they are in use."""

import os
import ssl
from dataclasses import dataclass
from pathlib import Path

import trustme
from cryptography import x509

from epd.rpc.roles import role_name
from epd.rpc.tls_config import ClientTlsConfig


@dataclass(frozen=True)
class CertificateFiles:
    """The files of one process or client."""

    certificate: Path
    key: Path
    ca: Path

    @property
    def flags(self) -> tuple[str, ...]:
        """Of a service that uses them."""
        return (
            f"--tls-certificate={self.certificate}",
            f"--tls-key={self.key}",
            f"--tls-ca={self.ca}",
        )

    @property
    def serial(self) -> int:
        """Serial number of the certificate that the file holds now."""
        return x509.load_pem_x509_certificate(self.certificate.read_bytes()).serial_number

    def client(self, server_name: str) -> ClientTlsConfig:
        """Settings of a client that uses them."""
        return ClientTlsConfig(
            tls_certificate=self.certificate,
            tls_key=self.key,
            tls_ca=self.ca,
            tls_server_name=server_name,
            tls_reload_s=0.1,
        )

    def context(self) -> ssl.SSLContext:
        """For HTTPS by address."""
        context = ssl.create_default_context(cafile=self.ca)
        context.check_hostname = False
        context.load_cert_chain(self.certificate, self.key)
        context.set_alpn_protocols(["h2", "http/1.1"])
        return context


class Authority:
    """A CA."""

    def __init__(self) -> None:
        self._ca = trustme.CA()

    @property
    def pem(self) -> bytes:
        """Its own certificate."""
        return self._ca.cert_pem.bytes()

    def issue(self, folder: Path, role: str, *names: str) -> CertificateFiles:
        """Writes, or replaces, the files of a role; ``names`` are further names."""
        folder.mkdir(parents=True, exist_ok=True)
        files = CertificateFiles(*(folder / f"{role}-{part}.pem" for part in ("cert", "key", "ca")))
        issued = self._ca.issue_cert(role_name(role), *names)
        replace(files.key, issued.private_key_pem.bytes())
        replace(files.certificate, b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        if not files.ca.exists():
            replace(files.ca, self.pem)
        return files


def replace(file: Path, content: bytes) -> None:
    """A file is there in its old form or in its new one, never in part."""
    new = file.with_suffix(".new")
    new.write_bytes(content)
    os.replace(new, file)
