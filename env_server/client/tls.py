"""TLS to environment servers: whose certificates are trusted, and what to do about one that is not.

Trusted are the authorities of the system and, for an authority of one's own, those in the file that SSL_CERT_FILE
names, as everywhere that OpenSSL is. OpenSSL ignores a file that is not there or holds no certificate; here that is an
error.
"""

from __future__ import annotations

import os
import ssl

from env_server.client.errors import CertificateError
from env_server.client.servers import Server

CA_VARIABLE = "SSL_CERT_FILE"

_UNKNOWN_ISSUER = frozenset({2, 18, 19, 20, 21})
_OUT_OF_DATE = frozenset({9, 10})
_OTHER_NAME = frozenset({62, 64})
"""OpenSSL's X509_V_ERR numbers, which the ssl module has no names for."""


def client_context(server: Server) -> ssl.SSLContext:
    """Return what certificates are checked with. Raises CertificateError where SSL_CERT_FILE does not name any.

    Reading the system's authorities takes some 20 ms: make one for all connections.
    """
    context = ssl.create_default_context()
    if file := os.environ.get(CA_VARIABLE):
        try:
            context.load_verify_locations(file)
        except OSError as error:
            why = "holds no certificate" if isinstance(error, ssl.SSLError) else f"cannot be read: {error.strerror}"
            raise CertificateError(server.name, f"the file that {CA_VARIABLE} names, {file}, {why}") from error
    return context


def not_trusted(server: Server, error: ssl.SSLCertVerificationError) -> CertificateError:
    """The error for a certificate that does not hold, with the fix."""
    code = error.verify_code
    if code in _UNKNOWN_ISSUER:
        file = os.environ.get(CA_VARIABLE)
        fix = (
            f"{file}, which {CA_VARIABLE} names, does not hold the certificate of its authority; add it there"
            if file
            else f"if its authority is your own, put that one's certificate into a file and set {CA_VARIABLE} to it"
        )
    elif code in _OTHER_NAME:
        fix = "put the name that the certificate was made for into the URL, or this one into the certificate"
    elif code in _OUT_OF_DATE:
        fix = "renew it on the server, or set this machine's clock"
    else:
        fix = "give the server another one"
    return CertificateError(server.name, f"its certificate is not trusted: {error.verify_message.rstrip('.')}; {fix}")
