"""TLS with client certificates on 127.0.0.1 in front of an engine's unix socket, as a remote engine would listen."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

CHUNK = 1 << 16


@contextmanager
def tls_forwarder(socket_path: str, certificates: Path) -> Iterator[str]:
    """Yields `tcp://127.0.0.1:PORT?certificates=FOLDER`; only who has the certificates in the folder is served."""
    make_certificates(certificates)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates / "ca.pem"))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(str(certificates / "cert.pem"), str(certificates / "key.pem"))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="tls forwarder")
    thread.start()

    async def serve() -> asyncio.Server:
        return await asyncio.start_server(lambda r, w: _forward(r, w, socket_path), "127.0.0.1", 0, ssl=context)

    async def finish(server: asyncio.Server) -> None:
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    server = asyncio.run_coroutine_threadsafe(serve(), loop).result(10)
    try:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}?certificates={certificates}"
    finally:
        asyncio.run_coroutine_threadsafe(finish(server), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, socket_path: str) -> None:
    engine_reader, engine_writer = await asyncio.open_unix_connection(socket_path)
    ways = [asyncio.ensure_future(_copy(reader, engine_writer)), asyncio.ensure_future(_copy(engine_reader, writer))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        writer.close()
        engine_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(CHUNK):
        writer.write(piece)
        await writer.drain()


def make_certificates(folder: Path) -> None:
    """`ca.pem`, and one `cert.pem` and `key.pem` that serve both sides."""
    folder.mkdir(parents=True, exist_ok=True)
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority_name = _name("test authority")
    authority = (
        _certificate(authority_name, authority_name, authority_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    leaf = (
        _certificate(_name("localhost"), authority_name, key)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    (folder / "ca.pem").write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    (folder / "cert.pem").write_bytes(leaf.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
    )
