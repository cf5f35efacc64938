//! Values that sessions expose to other servers, and which servers this one may fetch from.
//!
//! An exposure is known from the moment its message arrives, and has its value once the device has come to it. It ends
//! when all its fetches are done, at its deadline, or with its session.

use crate::address::{Address, Scheme};
use crate::protocol::message::Capability;
use kiln_device::{Data, Error};
use kiln_ir::Meta;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use tokio_rustls::rustls::ClientConfig;

/// How long a fetch waits for an exposure that nobody has announced: its message may be on its way.
const UNANNOUNCED: Duration = Duration::from_secs(2);
/// The longest that a client may expose a value for.
const LONGEST: Duration = Duration::from_secs(3600);
/// Exposures of all sessions.
const MOST: usize = 1 << 18;
/// Exposures of a session.
const MOST_OF_SESSION: usize = 1 << 14;
/// Transfers that may have begun of one exposure.
const MOST_BEGUN: usize = 1 << 10;

/// What a server exposes and may fetch.
#[derive(Default)]
pub struct Moves {
    advertise: String,
    allow: Vec<String>,
    /// Who vouches for peers with TLS.
    tls: OnceLock<Arc<ClientConfig>>,
    /// Where this server is itself.
    own: OnceLock<Vec<String>>,
    exposed: Mutex<Exposures>,
    /// Something was announced.
    announced: Notify,
}

/// What is exposed. Keyed: clients choose capabilities, and must not choose ones that collide.
#[derive(Default)]
struct Exposures {
    by: HashMap<Capability, Arc<Exposure>>,
    /// How much each session exposes.
    of: HashMap<u64, usize>,
}

impl Exposures {
    fn remove(&mut self, capability: &Capability) -> Option<Arc<Exposure>> {
        let gone = self.by.remove(capability)?;
        if let Entry::Occupied(mut count) = self.of.entry(gone.session) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
        Some(gone)
    }
}

/// A value that may be fetched.
pub struct Exposure {
    session: u64,
    state: Mutex<State>,
    ready: Notify,
}

#[derive(Default)]
struct State {
    value: Option<Result<Data, Error>>,
    fetches: u64,
    /// Transfers that have begun, and those that are done.
    begun: HashSet<u64>,
    done: u64,
    patience: Duration,
    end: Option<Instant>,
    /// Its session is gone, or its time is over.
    over: bool,
}

impl Moves {
    /// A server that others reach at `advertise` (empty if they take the way that the client has taken), and that may
    /// fetch from the peers in `allow`: `host`, `host:port`, `*` for all hosts, or `unix:/path`. Besides those it fetches
    /// from itself alone.
    pub fn new(advertise: impl Into<String>, allow: Vec<String>) -> Moves {
        Moves { advertise: advertise.into(), allow, ..Moves::default() }
    }

    /// How other servers reach this one.
    pub fn advertise(&self) -> &str {
        &self.advertise
    }

    /// The same with certificates that vouch for peers.
    pub fn with_tls(self, tls: Arc<ClientConfig>) -> Moves {
        Moves { tls: OnceLock::from(tls), ..self }
    }

    /// Who vouches for peers with TLS.
    pub(super) fn tls(&self) -> Option<Arc<ClientConfig>> {
        self.tls.get().cloned()
    }

    /// Where the server listens.
    pub(super) fn is_at<'a>(&self, tcp: &[SocketAddr], unix: impl Iterator<Item = &'a Path>) {
        let mut own: Vec<String> = unix.map(|path| format!("unix:{}", path.display())).collect();
        for address in tcp {
            own.push(address.to_string());
            if address.ip().is_unspecified() {
                let port = address.port();
                own.extend([format!("127.0.0.1:{port}"), format!("[::1]:{port}")]);
            }
        }
        let _ = self.own.set(own);
    }

    /// An exposure will come. False if the session exposes too much already.
    pub fn announce(&self, session: u64, capability: Capability) -> bool {
        let there = self.exposure(session, capability).is_some();
        self.announced.notify_waiters();
        there
    }

    /// An exposure's value is there.
    pub fn expose(&self, session: u64, shown: Shown) {
        let Some(exposure) = self.exposure(session, shown.capability) else { return };
        let patience = shown.patience.min(LONGEST);
        let mut state = exposure.lock();
        // Exposed again, everything starts anew; what the stream has freed since stays what it was.
        let value = match (shown.value, state.value.take()) {
            (Err(Error::UnknownValue(_)), Some(before)) => before,
            (value, _) => value,
        };
        *state = State {
            value: Some(value),
            fetches: shown.fetches,
            patience,
            end: Some(Instant::now() + patience),
            ..State::default()
        };
        drop(state);
        exposure.ready.notify_waiters();
        self.announced.notify_waiters();
    }

    /// The session's exposure under this capability, if it has one or may have another.
    fn exposure(&self, session: u64, capability: Capability) -> Option<Arc<Exposure>> {
        let mut exposed = self.lock();
        if let Some(exposure) = exposed.by.get(&capability) {
            // What another session exposes stays what it is.
            return (exposure.session == session).then(|| exposure.clone());
        }
        if exposed.by.len() >= MOST || exposed.of.get(&session).is_some_and(|&n| n >= MOST_OF_SESSION) {
            return None;
        }
        let fresh = Arc::new(Exposure { session, state: Mutex::default(), ready: Notify::new() });
        exposed.by.insert(capability, fresh.clone());
        *exposed.of.entry(session).or_default() += 1;
        Some(fresh)
    }

    /// The exposure, which may come a little later than the question.
    pub async fn find(&self, capability: &Capability) -> Option<Arc<Exposure>> {
        let end = tokio::time::Instant::now() + UNANNOUNCED;
        loop {
            let mut announced = std::pin::pin!(self.announced.notified());
            announced.as_mut().enable();
            if let Some(exposure) = self.lock().by.get(capability) {
                return Some(exposure.clone());
            }
            tokio::time::timeout_at(end, announced).await.ok()?;
        }
    }

    /// A transfer has arrived whole.
    pub fn done(&self, capability: &Capability) {
        let mut exposed = self.lock();
        let over = exposed.by.get(capability).is_some_and(|exposure| {
            let mut state = exposure.lock();
            state.done += 1;
            state.done >= state.fetches || state.begun.len() >= MOST_BEGUN && state.done >= MOST_BEGUN as u64
        });
        let gone = if over { exposed.remove(capability) } else { None };
        drop(exposed);
        drop(gone);
    }

    /// Ends what nobody fetched in time, and what belongs to sessions that are gone. Gives it back to be dropped.
    pub fn expire(&self, alive: impl Fn(u64) -> bool) -> Vec<Arc<Exposure>> {
        let now = Instant::now();
        let mut exposed = self.lock();
        let over = |e: &Exposure| e.lock().end.is_some_and(|end| end <= now) || !alive(e.session);
        let gone: Vec<_> =
            exposed.by.iter().filter(|(_, e)| over(e)).map(|(capability, _)| *capability).collect();
        let gone: Vec<_> = gone.iter().filter_map(|capability| exposed.remove(capability)).collect();
        drop(exposed);
        for exposure in &gone {
            exposure.lock().over = true;
            exposure.ready.notify_waiters();
        }
        gone
    }

    /// Exposures now.
    pub fn count(&self) -> usize {
        self.lock().by.len()
    }

    /// Whether this server may fetch from the one at `url`.
    pub fn allowed(&self, url: &str) -> Result<Address, String> {
        // Options name files, and choose how a client behaves: they are no part of a peer's address.
        if url.contains('?') {
            return Err("the address of a peer has no options".into());
        }
        let address = Address::parse(url).map_err(|e| e.to_string())?;
        let own = self.own.get().map_or(&[][..], |own| own);
        let named = |host: &String| match address.scheme {
            Scheme::Unix => {
                host.strip_prefix("unix:").map(|p| p.strip_prefix("//").unwrap_or(p)) == Some(&address.host)
            }
            _ => *host == "*" || *host == address.host || *host == address.authority(),
        };
        let device = address.device.is_empty();
        match device && own.iter().chain(&self.allow).any(named) {
            true => Ok(address),
            false => Err(format!("{address} is none of the peers that --allow-peer names")),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Exposures> {
        self.exposed.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// What a session exposes.
pub struct Shown {
    /// What it is exposed under.
    pub capability: Capability,
    /// How often it may be fetched.
    pub fetches: u64,
    /// How long nobody may come for it.
    pub patience: Duration,
    /// The value, or why there is none.
    pub value: Result<Data, Error>,
}

/// What a session wants of its server, besides computing.
pub enum Order {
    /// A value will be exposed under this capability.
    Announce(Capability),
    /// A value is to be fetched from another server.
    Fetch(Fetch),
    /// The client asks for what the session exposes.
    Recall(u64, Capability),
}

/// A value to be fetched.
#[derive(Clone, Debug)]
pub struct Fetch {
    /// Its transfer.
    pub transfer: u64,
    /// Its dtype and shape.
    pub meta: Meta,
    /// Which start of a server exposes it.
    pub incarnation: u64,
    /// Where that server is.
    pub url: String,
    /// What it is exposed under.
    pub capability: Capability,
}

impl Exposure {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The session that exposes it.
    pub fn session(&self) -> u64 {
        self.session
    }

    /// The value, once it is there; `None` if its session or its time ends before.
    pub async fn value(&self) -> Option<Result<Data, Error>> {
        loop {
            let mut ready = std::pin::pin!(self.ready.notified());
            ready.as_mut().enable();
            {
                let state = self.lock();
                if state.over {
                    return None;
                }
                if let Some(value) = &state.value {
                    return Some(value.clone());
                }
            }
            ready.await;
        }
    }

    /// Begins a transfer, or goes on with one. False when all fetches are used up.
    pub fn begin(&self, transfer: u64) -> bool {
        let mut state = self.lock();
        if state.begun.contains(&transfer) {
            return true;
        }
        let free = (state.begun.len() as u64) < state.fetches.min(MOST_BEGUN as u64);
        free && state.begun.insert(transfer)
    }

    /// Puts the deadline off, because the receiver is there; gives how long it may stand still.
    pub fn touch(&self) -> Duration {
        let mut state = self.lock();
        state.end = Some(Instant::now() + state.patience);
        state.patience
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiln_device::Bytes;
    use kiln_ir::DType;

    fn shown(capability: Capability, fetches: u64, patience: Duration) -> Shown {
        let value = Ok(Data::new(Meta::new(DType::U8, [3]), Bytes::new(vec![1u8, 2, 3])));
        Shown { capability, fetches, patience, value }
    }

    #[tokio::test(start_paused = true)]
    async fn a_capability_serves_its_fetches_and_no_more() {
        let moves = Moves::default();
        assert!(moves.find(&[1; 32]).await.is_none(), "never exposed");
        moves.expose(7, shown([1; 32], 2, LONGEST));
        assert!(moves.find(&[2; 32]).await.is_none(), "another one");
        let exposure = moves.find(&[1; 32]).await.unwrap();
        assert!(exposure.begin(10) && exposure.begin(10), "asking again is no second fetch");
        assert!(exposure.begin(11));
        assert!(!exposure.begin(12), "used up");
        moves.done(&[1; 32]);
        assert_eq!(moves.count(), 1);
        moves.done(&[1; 32]);
        assert_eq!(moves.count(), 0);
    }

    #[tokio::test]
    async fn what_a_session_exposes_is_not_replaced_by_another_and_bounded() {
        let moves = Moves::default();
        moves.expose(7, shown([1; 32], 1, LONGEST));
        let other = Data::new(Meta::new(DType::U8, [1]), Bytes::new(vec![9u8]));
        let (fetches, patience) = (1, LONGEST);
        moves.expose(8, Shown { capability: [1; 32], fetches, patience, value: Ok(other) });
        assert!(!moves.announce(8, [1; 32]));
        let there = moves.find(&[1; 32]).await.unwrap();
        assert_eq!((there.session(), there.value().await.unwrap().unwrap().bytes.len()), (7, 3));
        let name = |n: usize| std::array::from_fn(|i| n.to_le_bytes().get(i).copied().unwrap_or(77));
        let most = (0..).take_while(|&n| moves.announce(9, name(n))).count();
        assert_eq!(most, MOST_OF_SESSION);
        assert!(moves.announce(10, name(1 << 30)), "others may go on");
    }

    #[tokio::test]
    async fn exposures_end_with_their_time_and_their_session() {
        let moves = Moves::default();
        moves.expose(7, shown([1; 32], 1, Duration::ZERO));
        moves.expose(8, shown([2; 32], 1, LONGEST));
        moves.announce(9, [3; 32]);
        let waiting = moves.find(&[3; 32]).await.unwrap();
        moves.expire(|session| session == 8);
        assert_eq!(moves.count(), 1);
        assert!(waiting.value().await.is_none());
        moves.expire(|_| false);
        assert_eq!(moves.count(), 0);
    }

    #[test]
    fn strangers_are_not_fetched_from() {
        let peers = ["far", "near:9", "unix:/tmp/peer"].map(String::from);
        let moves = Moves::new("", peers.to_vec());
        moves.is_at(&["127.0.0.1:7".parse().unwrap()], [Path::new("/tmp/own")].into_iter());
        let mine = ["kiln://127.0.0.1:7", "unix:/tmp/own", "unix:///tmp/peer", "kiln://far:1", "ws://near:9"];
        for url in mine {
            assert!(moves.allowed(url).is_ok(), "{url}");
        }
        for url in [
            "kiln://near",
            "kiln://10.0.0.1",
            "kiln://far.away",
            "http://far",
            "",
            // This machine has more to hide than others.
            "kiln://127.0.0.1:6379",
            "ws://[::1]:7",
            "kilns://localhost",
            "unix:/run/other",
            "unix:far",
            "kilns://far:1?ca=/dev/zero",
            "kiln://127.0.0.1:7?token-file=/etc/passwd",
            "kiln://127.0.0.1:7/cpu?",
        ] {
            assert!(moves.allowed(url).is_err(), "{url}");
        }
        let all = Moves::new("", vec!["*".into()]);
        assert!(all.allowed("kiln://10.0.0.1").is_ok() && all.allowed("unix:/run/other").is_err());
    }
}
