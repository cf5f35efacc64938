//! Where a server listens, and how connections come in.

use super::serve::{Event, Server};
use crate::transport;
use socket2::{Domain, SockAddr, Socket, Type};
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
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None).map_err(named)?;
    socket.bind(&SockAddr::unix(path).map_err(named)?).map_err(named)?;
    // Nobody can connect before it listens, and then the mode is set.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(named)?;
    socket.listen(1024).map_err(named)?;
    socket.set_nonblocking(true).map_err(named)?;
    tokio::net::UnixListener::from_std(socket.into()).map_err(named)
}

/// How long a server that cannot take a connection waits before it tries again.
const STARVED: Duration = Duration::from_millis(50);

impl Server {
    pub(super) async fn accept_tcp(self: Arc<Server>, listener: TcpListener, tls: Option<TlsAcceptor>) {
        let mut starved = false;
        loop {
            match self.accepted(&mut starved, listener.accept().await).await {
                Some((stream, peer)) => {
                    let _ = stream.set_nodelay(true);
                    let (server, tls) = (self.clone(), tls.clone());
                    tokio::spawn(async move {
                        server.greet(Box::new(stream), &peer.to_string(), tls, false).await;
                    });
                }
                None => continue,
            }
        }
    }

    /// What was accepted. Out of file descriptors, most likely, otherwise: that is told once, sessions go on, and who
    /// wants to connect waits.
    async fn accepted<T>(&self, starved: &mut bool, outcome: io::Result<T>) -> Option<T> {
        match outcome {
            Ok(connection) => {
                *starved = false;
                Some(connection)
            }
            Err(e) => {
                if !std::mem::replace(starved, true) {
                    (self.log)(Event::Starved { reason: &e.to_string() });
                }
                tokio::time::sleep(STARVED).await;
                None
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
        let mut starved = false;
        loop {
            match self.accepted(&mut starved, listener.accept().await).await {
                Some((stream, _)) => {
                    transport::widen(&stream);
                    let (server, peer) = (self.clone(), format!("unix:{}", remove.0.display()));
                    // Who may open the socket was decided by its mode.
                    tokio::spawn(async move { server.greet(Box::new(stream), &peer, None, true).await });
                }
                None => continue,
            }
        }
    }
}
