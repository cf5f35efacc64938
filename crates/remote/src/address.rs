//! Addresses of servers: `kiln://host:port/device`, `kilns://`, `ws://`, `wss://`, `unix:/path`.
//!
//! Options stand behind a question mark: `token-file=FILE`, `clear=1`, `ca=FILE`, `device=NAME` (for `unix:`),
//! `compress=1`, `recover=0`. They are no part of a device's identity and are never shown. Each address of a list has its
//! own.

use kiln_device::Error;
use std::path::PathBuf;

/// The port where a server listens if none is named.
pub const PORT: u16 = 7717;

/// What may stand behind a question mark.
const KNOWN: &str = "options are token-file, clear, ca, device, compress and recover";

/// How a server is reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scheme {
    /// Frames over TCP.
    Kiln,
    /// The same inside TLS.
    Kilns,
    /// Frames in WebSocket messages.
    Ws,
    /// The same inside TLS.
    Wss,
    /// Frames over a Unix socket.
    Unix,
}

impl Scheme {
    fn name(self) -> &'static str {
        match self {
            Scheme::Kiln => "kiln",
            Scheme::Kilns => "kilns",
            Scheme::Ws => "ws",
            Scheme::Wss => "wss",
            Scheme::Unix => "unix",
        }
    }

    /// Whether bytes are encrypted on their way.
    pub fn is_tls(self) -> bool {
        matches!(self, Scheme::Kilns | Scheme::Wss)
    }
}

/// Where a server is, and which of its devices is meant.
#[derive(Clone, PartialEq, Eq)]
pub struct Address {
    /// How it is reached.
    pub scheme: Scheme,
    /// Its host, lower-case; for `unix:` the path of its socket.
    pub host: String,
    /// Its port; 0 for `unix:`.
    pub port: u16,
    /// The device; empty for the server's first.
    pub device: String,
    /// What is not part of the identity.
    pub options: Options,
}

/// How a client behaves towards a server.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Options {
    /// The file that holds the token.
    pub token_file: Option<PathBuf>,
    /// The certificates that vouch for the server, in PEM.
    pub ca: Option<PathBuf>,
    /// Send the token unencrypted to another machine.
    pub clear: bool,
    /// Compress what is sent.
    pub compress: bool,
    /// Do not keep what recovery needs.
    pub no_recovery: bool,
}

impl Address {
    /// Whether a text is meant to be the address of a server.
    pub fn is_remote(text: &str) -> bool {
        let text = text.trim_start().to_ascii_lowercase();
        ["kiln://", "kilns://", "ws://", "wss://", "unix:"].iter().any(|scheme| text.starts_with(scheme))
    }

    /// Parses one address.
    pub fn parse(text: &str) -> Result<Address, Error> {
        let text = text.trim();
        // What follows the question mark may name secrets, so it is not repeated in errors.
        let (place, query) = text.split_once('?').unwrap_or((text, ""));
        let bad = |reason: &str| Error::Address { address: place.into(), reason: reason.into() };
        let (scheme, rest) = place.split_once(':').ok_or_else(|| bad("it names no scheme"))?;
        let scheme = match scheme.to_ascii_lowercase().as_str() {
            "kiln" => Scheme::Kiln,
            "kilns" => Scheme::Kilns,
            "ws" => Scheme::Ws,
            "wss" => Scheme::Wss,
            "unix" => Scheme::Unix,
            _ => return Err(bad("known schemes are kiln, kilns, ws, wss and unix")),
        };
        let mut address = Address {
            scheme,
            host: String::new(),
            port: 0,
            device: String::new(),
            options: Options::default(),
        };
        if scheme == Scheme::Unix {
            address.host = rest.strip_prefix("//").unwrap_or(rest).to_string();
            if address.host.is_empty() {
                return Err(bad("it names no socket"));
            }
        } else {
            let rest = rest.strip_prefix("//").ok_or_else(|| bad("`//` must follow the scheme"))?;
            let (server, device) = rest.split_once('/').unwrap_or((rest, ""));
            if server.contains('@') {
                return Err(bad("a token does not belong into an address; use ?token-file="));
            }
            let (host, port) = match server.strip_prefix('[') {
                Some(six) => {
                    let (host, port) = six.split_once(']').ok_or_else(|| bad("`]` is missing"))?;
                    (host, port.strip_prefix(':'))
                }
                None => match server.rsplit_once(':') {
                    Some((host, port)) => (host, Some(port)),
                    None => (server, None),
                },
            };
            if host.is_empty() {
                return Err(bad("it names no host"));
            }
            address.host = host.to_ascii_lowercase();
            address.port = match port {
                Some(port) => port.parse().map_err(|_| bad("the port is not a number below 65536"))?,
                None => PORT,
            };
            address.device = device.trim_end_matches('/').to_ascii_lowercase();
        }
        for option in query.split('&').filter(|o| !o.is_empty()) {
            let (key, value) = option.split_once('=').unwrap_or((option, "1"));
            match key {
                "clear" => address.options.clear = value != "0",
                "token-file" => address.options.token_file = Some(value.into()),
                "ca" => address.options.ca = Some(value.into()),
                "device" => address.device = value.to_ascii_lowercase(),
                "compress" => address.options.compress = value != "0",
                "recover" => address.options.no_recovery = value == "0",
                // Without a value it may be a secret that somebody has put there.
                _ if !option.contains('=') => {
                    return Err(bad(&format!("one of its options is none; {KNOWN}")));
                }
                key => return Err(bad(&format!("`{}` is no option; {KNOWN}", key.escape_debug()))),
            }
        }
        Ok(address)
    }

    /// Parses several, separated by commas: the later ones stand in for the first.
    pub fn parse_all(text: &str) -> Result<Vec<Address>, Error> {
        text.split(',').map(Address::parse).collect()
    }

    /// Host and port as the system wants them.
    pub fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    /// The token: what the named file holds, else `KILN_TOKEN`, else nothing. One that anybody on the way could read is
    /// an error, unless the address permits it.
    pub fn token(&self) -> Result<Vec<u8>, Error> {
        let token = match &self.options.token_file {
            Some(path) => std::fs::read_to_string(path)
                .map_err(|e| Error::File { path: path.display().to_string(), message: e.to_string() })?,
            None => kiln_env::TOKEN.read()?.unwrap_or_default(),
        };
        let token = token.trim();
        if !token.is_empty() && !self.is_private() && !self.options.clear {
            return Err(Error::ClearToken { peer: self.to_string() });
        }
        Ok(token.into())
    }

    /// Whether nobody can read along: it is encrypted, or stays on this machine.
    fn is_private(&self) -> bool {
        self.scheme.is_tls() || self.scheme == Scheme::Unix || crate::transport::is_loopback(&self.host)
    }
}

/// The one spelling of an address: every way to write it gives this.
impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.scheme {
            Scheme::Unix => write!(f, "unix:{}", self.host)?,
            scheme => write!(f, "{}://{}", scheme.name(), self.authority())?,
        }
        match (self.device.as_str(), self.scheme) {
            ("", _) => Ok(()),
            (device, Scheme::Unix) => write!(f, "?device={device}"),
            (device, _) => write!(f, "/{device}"),
        }
    }
}

impl std::fmt::Debug for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_spellings_are_one() {
        for (text, want) in [
            ("kiln://Host", "kiln://host:7717"),
            ("KILN://host:7717/", "kiln://host:7717"),
            ("kilns://host:1/CPU:1?token-file=/t&compress", "kilns://host:1/cpu:1"),
            ("ws://[::1]:9", "ws://[::1]:9"),
            ("wss://[FE80::1]/cpu", "wss://[fe80::1]:7717/cpu"),
            ("unix:/tmp/A.sock", "unix:/tmp/A.sock"),
            ("unix:///tmp/a?device=cpu", "unix:/tmp/a?device=cpu"),
        ] {
            let address = Address::parse(text).unwrap();
            assert_eq!(address.to_string(), want);
            assert_eq!(Address::parse(want).unwrap().to_string(), want);
        }
    }

    #[test]
    fn bad_ones_are_told_and_secrets_are_not() {
        for text in [
            "",
            "host",
            "http://x",
            "kiln:x",
            "kiln://",
            "kiln://h:x",
            "kiln://h:70000",
            "kiln://a@h",
            "unix:",
            "kiln://[::1",
        ] {
            assert!(Address::parse(text).is_err(), "{text}");
        }
        let error = Address::parse("kiln://h:x?token-file=/secret/place").unwrap_err();
        assert!(!error.to_string().contains("secret"), "{error}");
        let address = Address::parse("kiln://h?token-file=/secret/place").unwrap();
        assert!(!format!("{address} {address:?}").contains("secret"));
        let error = Address::parse("kiln://h?tokenfile=/secret/place").unwrap_err().to_string();
        assert!(error.contains("`tokenfile` is no option") && error.contains("token-file"), "{error}");
        assert!(!error.contains("secret"), "{error}");
        let error = Address::parse("kiln://h?sesame").unwrap_err().to_string();
        assert!(!error.contains("sesame") && error.contains("token-file"), "{error}");
    }

    #[test]
    fn a_token_goes_in_clear_only_where_it_is_told_to() {
        let file = std::env::temp_dir().join(format!("kiln-address-{}", std::process::id()));
        std::fs::write(&file, "sesame\n").unwrap();
        let token = |url: &str, option: &str| {
            Address::parse(&format!("{url}?token-file={}{option}", file.display())).unwrap().token()
        };
        for url in ["kiln://192.0.2.7", "ws://far.example", "kiln://[2001:db8::1]:9"] {
            let error = token(url, "").unwrap_err();
            assert!(matches!(&error, Error::ClearToken { peer } if peer.starts_with(url)), "{error}");
            let text = error.to_string();
            assert!(
                text.contains("kilns://") && text.contains("clear=1") && !text.contains("sesame"),
                "{text}"
            );
            assert_eq!(token(url, "&clear=1").unwrap(), b"sesame");
            assert!(token(url, "&clear=0").is_err());
        }
        for url in
            ["kilns://192.0.2.7", "wss://far.example", "kiln://127.0.0.1:9", "ws://localhost", "unix:/s"]
        {
            assert_eq!(token(url, "").unwrap(), b"sesame", "{url}");
        }
        std::fs::remove_file(&file).unwrap();
        // Nothing that could be read along.
        assert_eq!(Address::parse("kiln://192.0.2.7").unwrap().token().unwrap(), b"");
    }
}
