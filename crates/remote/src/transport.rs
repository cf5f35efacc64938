//! Byte streams to and from servers: TCP, TLS, Unix sockets, WebSocket. Whatever it is, frames go over it.

use crate::address::{Address, Scheme};
use crate::protocol::link::Out;
use futures_util::{SinkExt, StreamExt};
use kiln_device::Bytes;
use std::io::{self, IoSlice};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;

/// A stream of bytes in both directions.
pub trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// Any such stream.
pub type Stream = Box<dyn Duplex>;

/// Bytes between a WebSocket and what reads it.
const PIPE: usize = 256 << 10;

/// Bytes gathered for one write.
const GATHER: usize = 512 << 10;

/// Frames on their way into a stream: short ones side by side, long data from where they are.
#[derive(Default)]
pub struct Gather {
    short: Vec<u8>,
    outs: Vec<Out>,
    bytes: usize,
    /// Long data, each with the place in `short` that it follows.
    long: Vec<(usize, Bytes)>,
}

impl Gather {
    /// Where control frames are appended. They go first.
    pub fn controls(&mut self) -> &mut Vec<u8> {
        &mut self.short
    }

    /// Whether another frame should go with those that are there.
    pub fn has_room(&self) -> bool {
        self.bytes < GATHER
    }

    /// Adds a frame.
    pub fn push(&mut self, out: Out) {
        self.bytes += out.len();
        self.outs.push(out);
    }

    /// Whether there is nothing to write.
    pub fn is_empty(&self) -> bool {
        self.short.is_empty() && self.outs.is_empty()
    }

    /// Reads what is not in memory yet, to be done before writing.
    pub fn load(&mut self) -> io::Result<()> {
        self.outs.iter_mut().try_for_each(Out::load)
    }

    /// Writes everything. Checksums are computed here.
    pub async fn write(&mut self, to: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
        for out in self.outs.drain(..) {
            if let Some(data) = out.append(&mut self.short) {
                self.long.push((self.short.len(), data));
            }
        }
        let mut slices = Vec::with_capacity(2 * self.long.len() + 1);
        let mut from = 0;
        for (at, data) in &self.long {
            slices.push(IoSlice::new(&self.short[from..*at]));
            slices.push(IoSlice::new(data));
            from = *at;
        }
        slices.push(IoSlice::new(&self.short[from..]));
        let mut left = &mut slices[..];
        // Leading empty slices are taken off.
        IoSlice::advance_slices(&mut left, 0);
        while !left.is_empty() {
            match to.write_vectored(left).await? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                n => IoSlice::advance_slices(&mut left, n),
            }
        }
        self.short.clear();
        self.long.clear();
        self.bytes = 0;
        to.flush().await
    }
}

/// Connects to a server.
pub async fn connect(address: &Address) -> io::Result<Stream> {
    let tls = match address.scheme.is_tls() {
        true => Some(client_tls(address.options.ca.as_deref())?),
        false => None,
    };
    connect_with(address, tls).await
}

/// Connects to a server for which these certificates vouch, if it has TLS.
pub async fn connect_with(address: &Address, tls: Option<Arc<ClientConfig>>) -> io::Result<Stream> {
    let stream: Stream = match address.scheme {
        #[cfg(unix)]
        Scheme::Unix => {
            let unix = tokio::net::UnixStream::connect(&address.host).await?;
            widen(&unix);
            Box::new(unix)
        }
        #[cfg(not(unix))]
        Scheme::Unix => return Err(io::Error::other("this system has no Unix sockets")),
        _ => {
            let tcp = TcpStream::connect(address.authority()).await?;
            // Batches are small and answers are waited for.
            tcp.set_nodelay(true)?;
            Box::new(tcp)
        }
    };
    let stream = if address.scheme.is_tls() {
        let config = tls.ok_or_else(|| io::Error::other("nobody vouches for peers with TLS"))?;
        let name = ServerName::try_from(address.host.clone()).map_err(io::Error::other)?;
        Box::new(TlsConnector::from(config).connect(name, stream).await?)
    } else {
        stream
    };
    match address.scheme {
        Scheme::Ws | Scheme::Wss => {
            let url = format!("ws://{}/", address.authority());
            let (socket, _) = tokio_tungstenite::client_async_with_config(url, stream, Some(limits()))
                .await
                .map_err(io::Error::other)?;
            Ok(unwrapped(socket))
        }
        Scheme::Kiln | Scheme::Kilns | Scheme::Unix => Ok(stream),
    }
}

/// Bytes that a Unix socket holds on their way, if the system allows: its default is less than one piece.
#[cfg(unix)]
const UNIX_BUFFER: usize = 1 << 20;

/// Lets a Unix socket hold more than a piece, so that both sides can work at once.
#[cfg(unix)]
pub fn widen(stream: &tokio::net::UnixStream) {
    let _ = socket2::SockRef::from(stream).set_send_buffer_size(UNIX_BUFFER);
}

/// The longest message of a WebSocket: a frame of ours, and room for those who cut differently.
const MOST_MESSAGE: usize = 1100 << 10;

fn limits() -> WebSocketConfig {
    WebSocketConfig::default()
        .read_buffer_size(16 << 10)
        .max_message_size(Some(MOST_MESSAGE))
        .max_frame_size(Some(MOST_MESSAGE))
}

/// Answers a WebSocket handshake on a stream whose first bytes are a request.
pub async fn accept_websocket(stream: Stream) -> io::Result<Stream> {
    let socket = tokio_tungstenite::accept_async_with_config(stream, Some(limits())).await;
    Ok(unwrapped(socket.map_err(io::Error::other)?))
}

/// How long a WebSocket has for its last bytes.
const CLOSING: Duration = Duration::from_secs(1);

/// The bytes inside a WebSocket's messages.
fn unwrapped(socket: WebSocketStream<Stream>) -> Stream {
    let (near, far) = tokio::io::duplex(PIPE);
    let (here, gone) = tokio::sync::oneshot::channel::<()>();
    tokio::spawn(async move {
        let (mut sink, mut source) = socket.split();
        let (mut reader, mut writer) = tokio::io::split(far);
        let inward = async {
            while let Some(Ok(message)) = source.next().await {
                let gone = match message {
                    Message::Binary(bytes) => writer.write_all(&bytes).await.is_err(),
                    Message::Close(_) => true,
                    _ => false,
                };
                if gone {
                    break;
                }
            }
        };
        let outward = async {
            let mut buffer = vec![0; 64 << 10];
            loop {
                match reader.read(&mut buffer).await {
                    Ok(n) if n > 0 => {
                        if sink.send(Message::binary(buffer[..n].to_vec())).await.is_err() {
                            break;
                        }
                    }
                    _ => break,
                }
            }
            let _ = sink.close().await;
        };
        // A peer that does not read holds nothing once nobody is here any more.
        let over = async {
            let _ = gone.await;
            tokio::time::sleep(CLOSING).await;
        };
        tokio::select! {
            () = inward => {}
            () = outward => {}
            () = over => {}
        }
    });
    Box::new(NotifyingStream { inner: near, _here: here })
}

/// A stream that tells when it is gone.
struct NotifyingStream {
    inner: DuplexStream,
    _here: tokio::sync::oneshot::Sender<()>,
}

impl AsyncRead for NotifyingStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl AsyncWrite for NotifyingStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

/// A stream whose first bytes have been looked at.
pub struct Rewound {
    first: Vec<u8>,
    given: usize,
    inner: Stream,
}

impl Rewound {
    /// `inner`, with `first` before it.
    pub fn new(first: Vec<u8>, inner: Stream) -> Rewound {
        Rewound { first, given: 0, inner }
    }
}

impl AsyncRead for Rewound {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let left = &self.first[self.given..];
        if !left.is_empty() {
            let n = left.len().min(buf.remaining());
            buf.put_slice(&left[..n]);
            self.given += n;
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl AsyncWrite for Rewound {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

fn provider() -> Arc<tokio_rustls::rustls::crypto::CryptoProvider> {
    Arc::new(tokio_rustls::rustls::crypto::ring::default_provider())
}

/// Who vouches for servers: the certificates in this file, else those that the system trusts.
pub fn client_tls(ca: Option<&Path>) -> io::Result<Arc<ClientConfig>> {
    let mut roots = RootCertStore::empty();
    match ca {
        Some(path) => {
            for certificate in CertificateDer::pem_file_iter(path).map_err(io::Error::other)? {
                roots.add(certificate.map_err(io::Error::other)?).map_err(io::Error::other)?;
            }
        }
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    let config = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
    Ok(Arc::new(config.map_err(io::Error::other)?.with_root_certificates(roots).with_no_client_auth()))
}

/// What a server needs for TLS: its certificates and key, in PEM.
pub fn server_tls(certificates: &Path, key: &Path) -> io::Result<TlsAcceptor> {
    let chain: Result<Vec<_>, _> =
        CertificateDer::pem_file_iter(certificates).map_err(io::Error::other)?.collect();
    let key = PrivateKeyDer::from_pem_file(key).map_err(io::Error::other)?;
    let config = ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
    let config = config.map_err(io::Error::other)?.with_no_client_auth();
    let config = config.with_single_cert(chain.map_err(io::Error::other)?, key).map_err(io::Error::other)?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Whether a host names this machine itself.
pub fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}
