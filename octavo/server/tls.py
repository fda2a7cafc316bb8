"""https: one context out of the --ssl-… flags, checked before the model is loaded."""

from __future__ import annotations

import ssl

from octavo.config import ServerOptions
from octavo.errors import ConfigError


def tls_context(options: ServerOptions) -> ssl.SSLContext | None:
    """None without a certificate. ConfigError names the file that is missing or cannot be used. TLS 1.2 is the least."""
    if not options.ssl_certfile:
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"):
            if getattr(options, name):
                raise ConfigError(f"--{name.replace('_', '-')} needs --ssl-certfile, the server's certificate.")
        return None
    if options.ssl_cert_reqs and not options.ssl_ca_certs:
        raise ConfigError("--ssl-cert-reqs needs --ssl-ca-certs, the authorities of clients' certificates.")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, password=_no_password)
    except (OSError, ValueError) as error:
        key = f" with --ssl-keyfile {options.ssl_keyfile}" if options.ssl_keyfile else ""
        raise ConfigError(f"Cannot use --ssl-certfile {options.ssl_certfile}{key}: {error}.") from None
    if options.ssl_ca_certs:
        try:
            context.load_verify_locations(options.ssl_ca_certs)
        except OSError as error:
            raise ConfigError(f"Cannot use --ssl-ca-certs {options.ssl_ca_certs}: {error}.") from None
        context.verify_mode = ssl.VerifyMode(options.ssl_cert_reqs)
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted, and a server has nobody to ask for its password; decrypt it (openssl pkey)")
