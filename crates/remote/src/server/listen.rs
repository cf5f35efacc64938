//! Where a server listens, and how connections come in.

use super::serve::{Event, Server};
use super::strangers::Peer;
#[cfg(unix)]
use crate::transport;
#[cfg(unix)]
use socket2::{Domain, SockAddr, Socket, Type};
use std::io;
use std::net::SocketAddr;
#[cfg(unix)]
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
#[cfg(unix)]
use tokio::net::UnixListener;
use tokio::net::{TcpListener, TcpSocket};
use tokio_rustls::TlsAcceptor;

/// Where there are no Unix sockets: nothing has this type.
#[cfg(not(unix))]
pub(super) enum UnixListener {}

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
pub struct Sockets {
    pub(super) tcp: Vec<Arc<TcpListener>>,
    pub(super) unix: Vec<(Arc<UnixListener>, Arc<UnixPath>)>,
    pub(super) tls: Option<TlsAcceptor>,
}

/// A socket's place, which is gone with this value unless another server has it by then.
pub(super) struct UnixPath {
    path: PathBuf,
    file: Option<(u64, u64)>,
}

impl UnixPath {
    #[cfg(unix)]
    fn file(path: &Path) -> Option<(u64, u64)> {
        std::fs::symlink_metadata(path).ok().map(|m| (m.dev(), m.ino()))
    }

    #[cfg(not(unix))]
    fn file(_: &Path) -> Option<(u64, u64)> {
        None
    }
}

impl Drop for UnixPath {
    fn drop(&mut self) {
        if self.file.is_some() && UnixPath::file(&self.path) == self.file {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Listen {
    /// Binds all sockets, so that what cannot work is known at once.
    pub async fn bind(self) -> io::Result<Sockets> {
        let mut tcp = Vec::new();
        for address in self.tcp {
            let named = |e: io::Error| io::Error::new(e.kind(), format!("{address}: {e}"));
            tcp.push(Arc::new(bind_tcp(address).map_err(named)?));
        }
        let mut unix = Vec::new();
        for path in self.unix {
            let listener = Arc::new(bind_unix(&path)?);
            let file = UnixPath::file(&path);
            unix.push((listener, Arc::new(UnixPath { path, file })));
        }
        Ok(Sockets { tcp, unix, tls: self.tls })
    }
}

impl Sockets {
    /// The TCP addresses, ports filled in.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.tcp.iter().filter_map(|l| l.local_addr().ok()).collect()
    }

    /// The paths of its Unix sockets.
    pub(super) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.unix.iter().map(|(_, place)| place.path.as_path())
    }
}

fn bind_tcp(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // Elsewhere this would let two servers have one port.
    #[cfg(unix)]
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG as u32)
}

/// A socket that only its owner may use. One that a dead server left behind is replaced; any other file stays.
#[cfg(unix)]
fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
    if std::os::unix::net::UnixStream::connect(path).is_ok() {
        return Err(named(io::ErrorKind::AddrInUse.into()));
    }
    match std::fs::symlink_metadata(path) {
        Ok(file) if file.file_type().is_socket() => std::fs::remove_file(path).map_err(named)?,
        Ok(_) => return Err(named(io::Error::other("there is a file that is no socket"))),
        Err(_) => {}
    }
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None).map_err(named)?;
    socket.bind(&SockAddr::unix(path).map_err(named)?).map_err(named)?;
    // Nobody can connect before it listens, and then the mode is set.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(named)?;
    socket.listen(BACKLOG).map_err(named)?;
    socket.set_nonblocking(true).map_err(named)?;
    UnixListener::from_std(socket.into()).map_err(named)
}

#[cfg(not(unix))]
fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    Err(io::Error::other(format!("{}: this system has no Unix sockets", path.display())))
}

/// Connections that are taken before those who were let in are heard: few beside the places of a host, so that nobody is
/// pushed out unheard; and many beside one, so that nobody waits long behind connections that are given up already.
const AT_ONCE: usize = 32;
/// Connections that wait to be taken, if the system allows as many. Who finds no place asks again after a whole second.
const BACKLOG: i32 = 2048;
/// How long a server that cannot take a connection waits before it tries again.
const STARVED: Duration = Duration::from_millis(50);

impl Server {
    pub(super) async fn accept_tcp(self: Arc<Server>, listener: Arc<TcpListener>, tls: Option<TlsAcceptor>) {
        let mut starved = false;
        for turn in 0usize.. {
            let Some((stream, peer)) = self.accepted(&mut starved, listener.accept().await).await else {
                continue;
            };
            let _ = stream.set_nodelay(true);
            let (server, tls) = (self.clone(), tls.clone());
            tokio::spawn(async move { server.greet(Box::new(stream), Peer::tcp(peer), tls).await });
            if turn.is_multiple_of(AT_ONCE) {
                tokio::task::yield_now().await;
            }
        }
    }

    /// What was accepted. Out of file descriptors, most likely, otherwise: that is told once, a stranger makes room,
    /// sessions go on, and who wants to connect waits.
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
                self.strangers.expel();
                tokio::time::sleep(STARVED).await;
                None
            }
        }
    }

    #[cfg(not(unix))]
    pub(super) async fn accept_unix(self: Arc<Server>, listener: Arc<UnixListener>, _: Arc<UnixPath>) {
        match *listener {}
    }

    #[cfg(unix)]
    pub(super) async fn accept_unix(self: Arc<Server>, listener: Arc<UnixListener>, place: Arc<UnixPath>) {
        let mut starved = false;
        loop {
            let Some((stream, _)) = self.accepted(&mut starved, listener.accept().await).await else {
                continue;
            };
            transport::widen(&stream);
            let (server, peer) = (self.clone(), Peer::unix(&place.path));
            tokio::spawn(async move { server.greet(Box::new(stream), peer, None).await });
            tokio::task::yield_now().await;
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_file_that_is_no_socket_stays_where_it_is() {
        let path = std::env::temp_dir().join(format!("kiln-listen-{}", std::process::id()));
        std::fs::write(&path, "precious").unwrap();
        let listen = |path: &Path| Listen { tcp: Vec::new(), unix: vec![path.into()], tls: None };
        assert!(listen(&path).bind().await.is_err());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
        std::fs::remove_file(&path).unwrap();
        // Who comes later keeps the socket that is its own.
        let first = listen(&path).bind().await.unwrap();
        std::fs::remove_file(&path).unwrap();
        let second = listen(&path).bind().await.unwrap();
        drop(first);
        assert!(path.exists());
        drop(second);
        assert!(!path.exists());
    }
}
