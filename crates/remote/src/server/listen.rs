//! Where a server listens, and how connections come in.

use super::serve::Server;
use crate::transport;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

/// Where and how to listen.
pub struct Listen {
    /// TCP addresses.
    pub tcp: Vec<SocketAddr>,
    /// Paths of Unix sockets.
    pub unix: Vec<PathBuf>,
    /// Certificates and key.
    pub tls: Option<TlsAcceptor>,
}

/// Sockets that a server has bound.
pub struct Bound {
    pub(super) tcp: Vec<TcpListener>,
    pub(super) unix: Vec<(tokio::net::UnixListener, PathBuf)>,
    pub(super) tls: Option<TlsAcceptor>,
}

impl Listen {
    /// Binds all sockets, so that what cannot work is known at once.
    pub async fn bind(self) -> io::Result<Bound> {
        let mut tcp = Vec::new();
        for address in self.tcp {
            let named = |e: io::Error| io::Error::new(e.kind(), format!("{address}: {e}"));
            tcp.push(TcpListener::bind(address).await.map_err(named)?);
        }
        let mut unix = Vec::new();
        for path in self.unix {
            unix.push((bind_unix(&path)?, path));
        }
        Ok(Bound { tcp, unix, tls: self.tls })
    }
}

impl Bound {
    /// The TCP addresses, ports filled in.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.tcp.iter().filter_map(|l| l.local_addr().ok()).collect()
    }
}

/// A socket that only its owner may use. One that a dead server left behind is replaced.
fn bind_unix(path: &Path) -> io::Result<tokio::net::UnixListener> {
    use std::os::unix::fs::PermissionsExt;
    let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
    if std::os::unix::net::UnixStream::connect(path).is_ok() {
        return Err(named(io::ErrorKind::AddrInUse.into()));
    }
    if path.exists() {
        std::fs::remove_file(path).map_err(named)?;
    }
    let listener = tokio::net::UnixListener::bind(path).map_err(named)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(named)?;
    Ok(listener)
}
impl Server {
    pub(super) async fn accept_tcp(self: Arc<Server>, listener: TcpListener, tls: Option<TlsAcceptor>) {
        loop {
            match listener.accept().await {
                Ok((stream, peer)) => {
                    let _ = stream.set_nodelay(true);
                    let (server, tls) = (self.clone(), tls.clone());
                    tokio::spawn(async move {
                        server.greet(Box::new(stream), &peer.to_string(), tls, false).await;
                    });
                }
                // Out of file descriptors, most likely: others go on, and this one tries again.
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    }

    pub(super) async fn accept_unix(self: Arc<Server>, listener: tokio::net::UnixListener, path: PathBuf) {
        struct Remove(PathBuf);
        impl Drop for Remove {
            fn drop(&mut self) {
                let _ = std::fs::remove_file(&self.0);
            }
        }
        let remove = Remove(path);
        loop {
            match listener.accept().await {
                Ok((stream, _)) => {
                    transport::widen(&stream);
                    let (server, peer) = (self.clone(), format!("unix:{}", remove.0.display()));
                    // Who may open the socket was decided by its mode.
                    tokio::spawn(async move { server.greet(Box::new(stream), &peer, None, true).await });
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    }
}
