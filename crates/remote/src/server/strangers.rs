//! Connections that have not shown yet that they may be here: few, and the oldest makes room for the newest.
//!
//! Nobody waits for a place. Who has the right token says so within a round trip, while a crowd that says nothing only
//! pushes itself out.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::Notify;

/// Strangers at once.
const MOST: usize = 192;
/// Strangers of one host.
const MOST_OF_HOST: usize = 128;
/// Strangers that speak WebSocket: each holds more than others do.
const MOST_WEB: usize = 8;

/// Who is there.
#[derive(Default)]
pub struct Strangers {
    there: Mutex<There>,
}

#[derive(Default)]
struct There {
    next: u64,
    /// By their coming.
    list: BTreeMap<u64, One>,
}

struct One {
    host: String,
    web: bool,
    leave: Arc<Notify>,
}

/// A stranger's place, given up with this value.
pub struct Stranger<'a> {
    strangers: &'a Strangers,
    number: u64,
    leave: Arc<Notify>,
    known: AtomicBool,
}

impl Strangers {
    /// A place for a connection from this host.
    pub fn enter(&self, host: &str) -> Stranger<'_> {
        let mut there = self.lock();
        if there.list.values().filter(|one| one.host == host).count() >= MOST_OF_HOST {
            there.expel(|one| one.host == host);
        }
        if there.list.len() >= MOST {
            let crowd = there.crowd();
            there.expel(|one| Some(&one.host) == crowd.as_ref());
        }
        let number = there.next;
        there.next += 1;
        let leave = Arc::new(Notify::new());
        there.list.insert(number, One { host: host.into(), web: false, leave: leave.clone() });
        Stranger { strangers: self, number, leave, known: AtomicBool::new(false) }
    }

    /// Sends the oldest away, to make room for another.
    pub fn expel(&self) {
        let mut there = self.lock();
        let crowd = there.crowd();
        there.expel(|one| Some(&one.host) == crowd.as_ref());
    }

    /// How many there are.
    #[cfg(test)]
    fn count(&self) -> usize {
        self.lock().list.len()
    }

    fn lock(&self) -> MutexGuard<'_, There> {
        self.there.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl There {
    /// The host with the most strangers.
    fn crowd(&self) -> Option<String> {
        let mut counts: HashMap<&str, usize> = HashMap::new();
        self.list.values().for_each(|one| *counts.entry(&one.host).or_default() += 1);
        let most = self.list.values().max_by_key(|one| counts.get(one.host.as_str()));
        most.map(|one| one.host.clone())
    }

    /// Sends the oldest of those away.
    fn expel(&mut self, those: impl Fn(&One) -> bool) {
        let oldest = self.list.iter().find(|(_, one)| those(one)).map(|(&number, _)| number);
        if let Some(one) = oldest.and_then(|number| self.list.remove(&number)) {
            one.leave.notify_one();
        }
    }
}

impl Stranger<'_> {
    /// It speaks WebSocket.
    pub fn is_web(&self) {
        let mut there = self.strangers.lock();
        if there.list.values().filter(|one| one.web).count() >= MOST_WEB {
            there.expel(|one| one.web);
        }
        if let Some(one) = there.list.get_mut(&self.number) {
            one.web = true;
        }
    }

    /// It has shown that it may be here: it takes no place any more, and makes no room.
    pub fn is_known(&self) {
        self.known.store(true, Ordering::Release);
        self.strangers.lock().list.remove(&self.number);
    }

    /// Ready when it has to make room.
    pub async fn expelled(&self) {
        self.leave.notified().await;
        if self.known.load(Ordering::Acquire) {
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Stranger<'_> {
    fn drop(&mut self) {
        self.strangers.lock().list.remove(&self.number);
    }
}

/// Who is at the other end of a connection.
#[derive(Clone, Debug)]
pub struct Peer {
    /// As the log names it.
    pub name: String,
    /// What counts as one host.
    pub host: String,
    /// The way to it cannot be listened to.
    pub near: bool,
    /// The transport has shown that it may connect.
    pub trusted: bool,
}

impl Peer {
    /// At a TCP address.
    pub fn tcp(address: std::net::SocketAddr) -> Peer {
        let ip = address.ip().to_canonical();
        let host = match ip {
            IpAddr::V4(ip) => ip.to_string(),
            // Whoever has one address of a network has all of it.
            IpAddr::V6(ip) => {
                let [a, b, c, d, ..] = ip.segments();
                format!("{a:x}:{b:x}:{c:x}:{d:x}")
            }
        };
        Peer { name: address.to_string(), host, near: ip.is_loopback(), trusted: false }
    }

    /// At a Unix socket, whose mode decides who may connect.
    pub fn unix(path: &std::path::Path) -> Peer {
        let name = format!("unix:{}", path.display());
        Peer { host: name.clone(), name, near: true, trusted: true }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    fn is_expelled(stranger: &Stranger<'_>) -> bool {
        let mut cx = Context::from_waker(Waker::noop());
        matches!(pin!(stranger.expelled()).poll(&mut cx), Poll::Ready(()))
    }

    #[test]
    fn the_crowd_makes_room_and_others_do_not() {
        let strangers = Strangers::default();
        let quiet = strangers.enter("quiet");
        let crowd: Vec<_> = (0..MOST_OF_HOST).map(|_| strangers.enter("crowd")).collect();
        let more: Vec<_> = (0..300).map(|_| strangers.enter("crowd")).collect();
        assert_eq!(strangers.count(), MOST_OF_HOST + 1);
        assert!(crowd.iter().all(is_expelled), "the oldest go first");
        let left = |list: &[Stranger<'_>]| list.iter().filter(|s| !is_expelled(s)).count();
        assert_eq!(left(&more), MOST_OF_HOST);
        // Many hosts: the total holds, and the largest crowd pays.
        let hosts: Vec<_> = (0..200).map(|i| strangers.enter(&format!("host-{i}"))).collect();
        assert_eq!(strangers.count(), MOST);
        drop((crowd, more, hosts));
        assert_eq!(strangers.count(), 1);
        assert!(!is_expelled(&quiet));
    }

    #[test]
    fn who_has_shown_a_token_makes_no_room() {
        let strangers = Strangers::default();
        let friend = strangers.enter("crowd");
        friend.is_known();
        let crowd: Vec<_> = (0..MOST_OF_HOST).map(|_| strangers.enter("crowd")).collect();
        assert!(!is_expelled(&friend) && !crowd.iter().any(is_expelled), "it takes no place either");
        // Also not if it was told to leave before it could show it.
        let late = strangers.enter("crowd");
        let _more: Vec<_> = (0..MOST_OF_HOST).map(|_| strangers.enter("crowd")).collect();
        late.is_known();
        assert!(!is_expelled(&late));
    }

    #[test]
    fn networks_are_hosts() {
        let host = |text: &str| Peer::tcp(text.parse().unwrap()).host;
        assert_eq!(host("[2001:db8::1]:5"), host("[2001:db8::ffff:2]:9"));
        assert_ne!(host("[2001:db8::1]:5"), host("[2001:db8:0:1::1]:5"));
        assert_eq!(host("[::ffff:10.0.0.1]:5"), "10.0.0.1");
        assert!(Peer::tcp("[::1]:5".parse().unwrap()).near && !Peer::tcp("10.0.0.1:5".parse().unwrap()).near);
    }
}
