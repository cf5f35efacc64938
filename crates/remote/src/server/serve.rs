//! The server's connections: one port for tensors, browsers and monitors.

use super::fetch::MOST_GIVEN;
use super::http;
use super::listen::Sockets;
use super::moves::Exposure;
use super::registry::{Client, Registry, Visitor};
use super::schedule::Schedule;
use super::session::SessionEvent;
use super::strangers::{Peer, Stranger, Strangers};
use crate::protocol::frame::control;
use crate::protocol::frame::{self, Decoder, Frame};
use crate::protocol::greeting::{Refusal, Welcome};
use crate::protocol::message::{self, Capability, Message, kind};
use crate::transport::{Gather, Rewound, Stream};
use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio_rustls::TlsAcceptor;

/// How long a stranger has for a complete hello, and a peer to take in an answer of a few bytes.
pub(super) const HELLO: Duration = Duration::from_secs(5);
/// The longest hello: it holds an operation table.
const MOST_HELLO: usize = 128 << 10;
/// How long an acknowledgement may wait for company.
const ACK_DELAY: Duration = Duration::from_millis(5);
/// How long a server that drains must have had nothing to do before it goes.
const QUIET: Duration = Duration::from_millis(200);
/// How long a client with a wrong token waits for the answer.
const WRONG_TOKEN: Duration = Duration::from_millis(200);
/// Wrong tokens within [`FORGIVEN`] that make a host suspect: one of its wrong tokens in [`WRONG_TOKEN`] is answered
/// from then on. A right one never waits.
const SUSPECT: u32 = 10;
/// Wrong tokens of a suspect host that may wait for their answer; further ones are answered at once.
const MOST_WAITING: u32 = 16;
/// After how long without a wrong token a host is trusted again.
const FORGIVEN: Duration = Duration::from_secs(10);
/// Hosts whose wrong tokens are counted.
const MOST_SUSPECTS: usize = 1024;
/// Those who look on, at once.
const MOST_WATCHERS: usize = 64;
/// How old the status may be that is told.
const STATUS: Duration = Duration::from_secs(1);
/// How long sessions may wait because all workers have long tasks.
const STUCK: Duration = Duration::from_millis(500);
/// Bytes taken in at once after which others have their turn.
const MUCH: usize = 16 << 10;
/// Exposures that are looked through at every beat of the housekeeping.
const FEW: usize = 4096;
/// Lines of the log in a second that strangers may cause.
const MOST_LINES: u32 = 16;

/// A running server.
pub struct Server {
    /// Its sessions.
    pub registry: Registry,
    pub(super) schedule: Schedule,
    start: Instant,
    pub(super) log: Box<dyn Fn(Event<'_>) + Send + Sync>,
    pub(super) strangers: Strangers,
    /// Those who have shown that they may connect to a Unix socket, and have not said what they want.
    neighbours: Strangers,
    pub(super) giving: tokio::sync::Semaphore,
    pub(super) watching: tokio::sync::Semaphore,
    /// Wrong tokens by host.
    suspects: Mutex<HashMap<String, Suspect>>,
    /// What the server looked like, and when.
    look: Mutex<Option<(Instant, Arc<serde_json::Value>)>>,
    lines: Mutex<Lines>,
    /// Where handshakes are computed.
    handshakes: OnceLock<tokio::runtime::Handle>,
}

/// A host that has sent wrong tokens.
struct Suspect {
    count: u32,
    last: Instant,
    /// When the last one that waits is answered.
    answered: Instant,
}

/// Lines of the log that strangers have caused.
struct Lines {
    since: Instant,
    told: u32,
    left_out: u64,
}

/// What a server tells about itself while it runs.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub enum Event<'a> {
    Opened {
        session: u64,
        program: &'a str,
        peer: &'a str,
    },
    Resumed {
        session: u64,
        peer: &'a str,
    },
    Lost {
        session: u64,
        reason: &'a str,
    },
    Ended {
        session: u64,
        reason: &'a str,
    },
    Refused {
        peer: &'a str,
        reason: &'a str,
    },
    /// A value does not come from another server directly.
    Detour {
        session: u64,
        reason: &'a str,
    },
    /// So many refusals and detours of the last second were not told.
    LeftOut {
        lines: u64,
    },
    Draining {
        sessions: usize,
    },
    /// Connections cannot be taken at present.
    Starved {
        reason: &'a str,
    },
    /// A part of the server has failed and was started again.
    Restarted {
        part: &'a str,
    },
}

impl Server {
    /// A server that tells `log` what happens. It is called by the thread that everybody waits for, so it must not wait.
    pub fn new(registry: Registry, log: impl Fn(Event<'_>) + Send + Sync + 'static) -> Arc<Server> {
        Arc::new(Server {
            registry,
            schedule: Schedule::default(),
            start: Instant::now(),
            log: Box::new(log),
            strangers: Strangers::default(),
            neighbours: Strangers::default(),
            giving: tokio::sync::Semaphore::new(MOST_GIVEN),
            watching: tokio::sync::Semaphore::new(MOST_WATCHERS),
            suspects: Mutex::default(),
            look: Mutex::default(),
            lines: Mutex::new(Lines { since: Instant::now(), told: 0, left_out: 0 }),
            handshakes: OnceLock::new(),
        })
    }

    /// Time since the start.
    pub fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// Serves until `stop` is ready, then lets sessions finish what they have sent. After `grace` what still computes is
    /// stopped.
    pub async fn run(
        self: &Arc<Server>,
        bound: Sockets,
        workers: usize,
        stop: impl Future<Output = ()>,
        grace: Duration,
    ) {
        self.registry.moves().is_at(&bound.addresses(), bound.paths());
        // Workers and handshakes end with this call, however it ends.
        struct Stop<'a>(&'a Schedule);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.stop();
            }
        }
        let working = Stop(&self.schedule);
        let workers: Vec<_> = (0..workers.max(1))
            .filter_map(|i| {
                let server = self.clone();
                let named = std::thread::Builder::new().name(format!("kiln-work-{i}"));
                let work = move || {
                    supervised_thread(|| server.schedule.serve(), || server.restarted("worker"));
                };
                named.spawn(work).ok()
            })
            .collect();
        let (_shaking, end) = tokio::sync::oneshot::channel::<()>();
        self.start_handshakes(end);
        let mut tasks = tokio::task::JoinSet::new();
        for listener in bound.tcp {
            let (server, tls) = (self.clone(), bound.tls.clone());
            let accept = move || server.clone().accept_tcp(listener.clone(), tls.clone());
            tasks.spawn(self.clone().supervised("accept", accept));
        }
        for (listener, place) in bound.unix {
            let server = self.clone();
            let accept = move || server.clone().accept_unix(listener.clone(), place.clone());
            tasks.spawn(self.clone().supervised("accept", accept));
        }
        let server = self.clone();
        tasks.spawn(self.clone().supervised("housekeeping", move || server.clone().housekeeping()));
        stop.await;
        // What is left of the time is for what has to be stopped.
        let end = Instant::now() + grace;
        self.drain(grace - grace / 5).await;
        tasks.shutdown().await;
        self.registry.list().iter().for_each(|client| client.end());
        drop(working);
        while !workers.iter().all(|worker| worker.is_finished()) && Instant::now() < end {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// A loop that must not end: when it fails it starts again.
    async fn supervised<F>(self: Arc<Server>, part: &'static str, work: impl Fn() -> F + Send + 'static)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        loop {
            // Aborted with this task.
            let mut running = tokio::task::JoinSet::new();
            running.spawn(work());
            match running.join_next().await {
                Some(Err(e)) if e.is_panic() => self.restarted(part),
                _ => return,
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    fn restarted(&self, part: &str) {
        (self.log)(Event::Restarted { part });
    }

    /// A thread for the arithmetic of strangers' handshakes, which would hold up everybody.
    fn start_handshakes(self: &Arc<Server>, end: tokio::sync::oneshot::Receiver<()>) {
        let server = self.clone();
        let run = move || {
            if let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() {
                let _ = server.handshakes.set(runtime.handle().clone());
                // An error is what is waited for: the other end is gone.
                let _ = runtime.block_on(end);
                runtime.shutdown_background();
            }
        };
        // Without it handshakes are computed where they come in.
        let _ = std::thread::Builder::new().name("kiln-tls".into()).spawn(run);
    }

    /// Tells everybody to go, and waits for work that was accepted.
    async fn drain(&self, grace: Duration) {
        self.registry.drain();
        (self.log)(Event::Draining { sessions: self.registry.list().len() });
        let end = Instant::now() + grace;
        let mut since = Instant::now();
        while Instant::now() < end {
            let clients = self.registry.list();
            clients.iter().for_each(|c| c.news.notify_one());
            let idle = |c: &Arc<Client>| c.session().load().0 == 0 && c.session().is_sent();
            // What clients had sent may still be on its way.
            if self.schedule.busy() > 0 || !clients.iter().all(idle) {
                since = Instant::now();
            } else if clients.is_empty() || since.elapsed() > QUIET {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        // A last chance for what is written.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }

    /// Ends sessions whose lease is over, and tasks that take too long.
    async fn housekeeping(self: Arc<Server>) {
        for beat in 0u64.. {
            tokio::time::sleep(Duration::from_millis(100)).await;
            self.registry.hurry();
            // Those with short tasks do not wait for those with long ones.
            if self.schedule.is_stuck(STUCK) {
                let server = self.clone();
                let named = std::thread::Builder::new().name("kiln-work-more".into());
                if named.spawn(move || server.schedule.help()).is_err() {
                    self.schedule.gave_up();
                }
            }
            let gone = self.registry.expire(self.now());
            // Many are looked through less often.
            let mut unused = Vec::new();
            if beat % 10 == 0 || self.registry.moves().count() < FEW {
                unused = self.registry.moves().expire(|session| self.registry.is_open(session));
            }
            for client in &gone {
                let reason = client.reason();
                let reason = reason.as_deref().unwrap_or("its lease is over, or it said goodbye");
                (self.log)(Event::Ended { session: client.number, reason });
            }
            if !gone.is_empty() || !unused.is_empty() {
                dropped((gone, unused));
            }
        }
    }

    /// Finds out what a connection wants, and does it.
    pub(super) async fn greet(self: &Arc<Server>, stream: Stream, peer: Peer, tls: Option<TlsAcceptor>) {
        let admission = {
            let strangers = if peer.trusted { &self.neighbours } else { &self.strangers };
            let stranger = strangers.enter(&peer.host);
            tokio::select! {
                admission = self.meet(stream, &peer, tls, &stranger) => admission,
                () = stranger.expelled() => Err(io::Error::other("no hello before others came")),
            }
        };
        let outcome = match admission {
            Ok(Admission::Answered) => Ok(()),
            Ok(Admission::Session(attached, stream, decoder, welcome)) => {
                self.attend(attached, stream, decoder, &welcome, &peer).await;
                Ok(())
            }
            Ok(Admission::Watch(stream, welcome)) => self.watched(stream, &welcome).await,
            Ok(Admission::Give(stream, exposure, ask)) => self.give(stream, &exposure, ask).await,
            Err(e) => Err(e),
        };
        if let Err(e) = outcome {
            self.refused(&peer.name, &e.to_string());
        }
    }

    /// Everything that is done for somebody who has not shown yet that they may be here.
    async fn meet(
        self: &Arc<Server>,
        stream: Stream,
        peer: &Peer,
        tls: Option<TlsAcceptor>,
        stranger: &Stranger<'_>,
    ) -> io::Result<Admission> {
        let hello = tokio::time::timeout(HELLO, self.hello(stream, peer, tls, stranger)).await;
        let (mut stream, decoder, payload) = match hello {
            Err(_) => return Err(io::Error::other("no hello in time")),
            Ok(Err(e)) => return Err(e),
            Ok(Ok(None)) => return Ok(Admission::Answered),
            Ok(Ok(Some(hello))) => hello,
        };
        // Opening a device takes its time.
        let admitted = match self.registry.vet(&payload, peer.trusted) {
            Err(refusal) => Err(refusal),
            Ok(shown) => {
                if shown {
                    stranger.is_known();
                }
                let (server, trusted) = (self.clone(), peer.trusted);
                // A session that nobody takes any more is without a connection at once.
                let admit = move || {
                    let (welcome, admitted) = server.registry.hello(&payload, trusted, server.now())?;
                    let attached = match admitted {
                        Visitor::Session(client, epoch) => {
                            Ok(Attachment { server: server.clone(), client, epoch })
                        }
                        other => Err(other),
                    };
                    Ok((welcome, attached))
                };
                tokio::task::spawn_blocking(admit).await.map_err(io::Error::other)?
            }
        };
        match admitted {
            Err(refusal) => {
                if refusal == Refusal::Token
                    && let Some(wait) = self.suspect(&peer.host)
                {
                    tokio::time::sleep(wait).await;
                }
                let told = control(kind::REFUSED, &refusal.encode());
                let _ = tokio::time::timeout(HELLO, farewell(&mut stream, &told)).await;
                Err(io::Error::other(refusal))
            }
            Ok((welcome, Ok(attached))) => Ok(Admission::Session(attached, stream, decoder, welcome)),
            Ok((welcome, Err(Visitor::Fetch(capability, transfer, from)))) => {
                let exposure = self.asked(&mut stream, &welcome, &capability).await?;
                Ok(Admission::Give(stream, exposure, (capability, transfer, from)))
            }
            Ok((welcome, Err(_))) => Ok(Admission::Watch(stream, welcome)),
        }
    }

    async fn hello(
        &self,
        mut stream: Stream,
        peer: &Peer,
        tls: Option<TlsAcceptor>,
        stranger: &Stranger<'_>,
    ) -> io::Result<Option<(Stream, Decoder, Vec<u8>)>> {
        // TLS, then a WebSocket, then frames: each once at most, and in this order.
        let plain = tls.is_none() || peer.near || self.registry.rules().allow_plain;
        let (mut tls, mut encrypted, mut web) = (tls, false, false);
        loop {
            let mut first = [0; 4];
            stream.read_exact(&mut first).await?;
            let rewound: Stream = Box::new(Rewound::new(first.to_vec(), stream));
            let request = first == *b"GET " || first == *b"HEAD";
            if first[0] == 0x16 && first[1] == 3 && !web {
                let acceptor = tls.take().ok_or_else(|| io::Error::other("TLS where none is set up"))?;
                stream = self.encrypted(acceptor, rewound).await?;
                encrypted = true;
            } else if request && !web {
                stranger.is_web();
                match http::serve(self, rewound, plain || encrypted).await? {
                    Some(upgraded) => stream = upgraded,
                    None => return Ok(None),
                }
                web = true;
            } else {
                stream = rewound;
                break;
            }
        }
        if !plain && !encrypted {
            let refusal = Refusal::Other("it wants TLS here: kilns:// or wss://".into());
            farewell(&mut stream, &control(kind::REFUSED, &refusal.encode())).await?;
            return Err(io::Error::other("not encrypted"));
        }
        let mut decoder = Decoder::default();
        loop {
            match decoder.next().map_err(io::Error::other)? {
                Some(frame) if frame.kind == kind::HELLO => {
                    let payload = frame.payload.to_vec();
                    return Ok(Some((stream, decoder, payload)));
                }
                Some(_) => return Err(io::Error::other("the first frame is no hello")),
                None => {}
            }
            if decoder.missing() > MOST_HELLO + frame::HEAD {
                return Err(io::Error::other("the first frame is too long"));
            }
            let spare = decoder.spare(4 << 10);
            match stream.read(spare).await? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => decoder.filled(n),
            }
        }
    }

    /// The inside of a TLS connection. Its handshake is computed elsewhere.
    async fn encrypted(&self, acceptor: TlsAcceptor, stream: Stream) -> io::Result<Stream> {
        let handshake = async move {
            let accepted = tokio::time::timeout(HELLO, acceptor.accept(stream)).await;
            accepted.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
        };
        let accepted = match self.handshakes.get() {
            Some(thread) => {
                // Ends with this future, should it have to make room.
                let mut task = tokio::task::JoinSet::new();
                task.spawn_on(handshake, thread);
                task.join_next().await.ok_or(io::ErrorKind::Other)?.map_err(io::Error::other)??
            }
            None => handshake.await?,
        };
        Ok(Box::new(accepted))
    }

    /// Serves a session until its connection ends.
    async fn attend(
        self: &Arc<Server>,
        attached: Attachment,
        stream: Stream,
        decoder: Decoder,
        welcome: &Welcome,
        peer: &Peer,
    ) {
        let Attachment { client, epoch, .. } = &attached;
        let (session, peer) = (client.number, peer.name.as_str());
        (self.log)(match welcome.resumed {
            Some(_) => Event::Resumed { session, peer },
            None => Event::Opened { session, program: &client.program, peer },
        });
        let (reader, mut writer) = tokio::io::split(stream);
        let greeted = async {
            writer.write_all(&control(kind::WELCOME, &welcome.encode())).await?;
            writer.flush().await
        };
        let end = match tokio::time::timeout(HELLO, greeted).await {
            Err(_) => "it does not take its welcome".into(),
            Ok(Err(e)) => e.to_string(),
            Ok(Ok(())) => tokio::select! {
                end = self.receive(client, *epoch, reader, decoder) => end,
                end = self.send(client, *epoch, writer) => end,
                () = client.superseded(*epoch) => "a newer connection has it".into(),
            },
        };
        if client.is_current(*epoch) {
            (self.log)(Event::Lost { session, reason: &end });
        }
    }

    /// Notes a wrong token. Gives how long its answer waits, if it does.
    fn suspect(&self, host: &str) -> Option<Duration> {
        let now = Instant::now();
        let mut suspects = self.suspects.lock().unwrap_or_else(|e| e.into_inner());
        if suspects.len() >= MOST_SUSPECTS {
            suspects.retain(|_, suspect| suspect.last.elapsed() < FORGIVEN);
        }
        if suspects.len() >= MOST_SUSPECTS && !suspects.contains_key(host) {
            return Some(WRONG_TOKEN);
        }
        let suspect = suspects.entry(host.into()).or_insert(Suspect { count: 0, last: now, answered: now });
        if suspect.last.elapsed() >= FORGIVEN {
            suspect.count = 0;
        }
        (suspect.count, suspect.last) = (suspect.count.saturating_add(1), now);
        if suspect.count <= SUSPECT {
            return Some(WRONG_TOKEN);
        }
        let at = suspect.answered.max(now) + WRONG_TOKEN;
        if at.duration_since(now) > MOST_WAITING * WRONG_TOKEN {
            return None;
        }
        suspect.answered = at;
        Some(at.duration_since(now))
    }

    /// Tells that somebody was not let in, unless there is too much of that.
    pub(super) fn refused(&self, peer: &str, reason: &str) {
        self.tell(Event::Refused { peer, reason });
    }

    /// Logs what others can cause as often as they like.
    pub(super) fn tell(&self, event: Event<'_>) {
        let (told, left_out) = {
            let mut lines = self.lines.lock().unwrap_or_else(|e| e.into_inner());
            let mut left_out = 0;
            if lines.since.elapsed() >= Duration::from_secs(1) {
                left_out = std::mem::take(&mut lines.left_out);
                (lines.since, lines.told) = (Instant::now(), 0);
            }
            let told = lines.told < MOST_LINES;
            match told {
                true => lines.told += 1,
                false => lines.left_out += 1,
            }
            (told, left_out)
        };
        if left_out > 0 {
            (self.log)(Event::LeftOut { lines: left_out });
        }
        if told {
            (self.log)(event);
        }
    }

    /// What the server looks like, a second old at most: looking costs others nothing, however often it is done.
    pub fn look(&self) -> Arc<serde_json::Value> {
        let mut look = self.look.lock().unwrap_or_else(|e| e.into_inner());
        if let Some((at, status)) = &*look
            && at.elapsed() < STATUS
        {
            return status.clone();
        }
        let status = Arc::new(self.status());
        *look = Some((Instant::now(), status.clone()));
        status
    }

    async fn receive(
        self: &Arc<Server>,
        client: &Arc<Client>,
        epoch: u64,
        mut reader: ReadHalf<Stream>,
        mut decoder: Decoder,
    ) -> String {
        // A client speaks at least once in a heartbeat; three silent ones and it is taken for gone.
        let patience = 3 * self.registry.config().heartbeat;
        let mut heard = tokio::time::Instant::now();
        loop {
            loop {
                // An older connection takes nothing in once a newer one has the session.
                let step = match decoder.next() {
                    Ok(None) => break,
                    Ok(Some(_)) if !client.is_current(epoch) => return "a newer connection has it".into(),
                    Ok(Some(frame)) => match message::compressed_piece(frame.kind) {
                        None => client.session().receive(&frame),
                        Some(kind) => {
                            // Expanding takes a while, which is not everybody's.
                            let (seq, packed, len) = (frame.seq, frame.payload.to_vec(), frame.payload.len());
                            let expand = move || message::expand(&packed);
                            match tokio::task::spawn_blocking(expand).await {
                                Ok(Ok(payload)) if client.is_current(epoch) => {
                                    let frame = Frame { seq, kind, payload: &payload };
                                    client.session().receive_as(&frame, len)
                                }
                                Ok(Ok(_)) => return "a newer connection has it".into(),
                                Ok(Err(e)) => Err(e),
                                Err(e) => return e.to_string(),
                            }
                        }
                    },
                    Err(e) => return e.to_string(),
                };
                match step {
                    Ok(SessionEvent::Going) => {}
                    Ok(SessionEvent::Ping(n)) => client.session().pong(n),
                    Ok(SessionEvent::Ended) => {
                        client.end();
                        return "the client said goodbye".into();
                    }
                    Err(e) => {
                        client.end_because(&e.to_string());
                        return e.to_string();
                    }
                }
            }
            self.obey(client);
            self.schedule.offer(client);
            client.news.notify_one();
            if decoder.heard() {
                heard = tokio::time::Instant::now();
            }
            let spare = decoder.spare_for_frame();
            let n = match tokio::time::timeout_at(heard + patience, reader.read(spare)).await {
                Err(_) => return format!("silent for {patience:?}"),
                Ok(Ok(0)) => return "the connection ended".into(),
                Ok(Ok(n)) => n,
                Ok(Err(e)) => return e.to_string(),
            };
            decoder.filled(n);
            if n >= MUCH {
                // Who always has more to say gives others their turn.
                tokio::task::yield_now().await;
            }
        }
    }

    async fn send(
        self: &Arc<Server>,
        client: &Arc<Client>,
        epoch: u64,
        mut writer: WriteHalf<Stream>,
    ) -> String {
        let mut gather = Gather::default();
        let (mut soon, mut told) = (false, false);
        loop {
            if client.is_over() || !client.is_current(epoch) {
                if let Some(reason) = client.reason() {
                    let _ = writer.write_all(&control(kind::ENDED, reason.as_bytes())).await;
                }
                let _ = writer.shutdown().await;
                return "the session is over".into();
            }
            let (owes, packing) = {
                let mut session = client.session();
                for notice in session.notices(soon) {
                    let (kind, body) = notice.encode();
                    gather.controls().extend(control(kind, &body.fields));
                }
                while gather.has_room()
                    && let Some(out) = session.next()
                {
                    gather.push(out);
                }
                (session.owes(), if gather.has_room() { session.packing() } else { None })
            };
            if let Some(packing) = packing {
                // Compressing takes a while, which is not everybody's.
                match tokio::task::spawn_blocking(move || packing.pack()).await {
                    Ok(packing) => client.session().packed(packing),
                    Err(e) => return e.to_string(),
                }
                continue;
            }
            if self.registry.is_draining() && !told {
                told = true;
                let (kind, body) = Message::Drain.encode();
                gather.controls().extend(control(kind, &body.fields));
            }
            if gather.is_empty() {
                let news = client.news.notified();
                if owes {
                    soon = tokio::time::timeout(ACK_DELAY, news).await.is_err();
                } else {
                    news.await;
                }
                // What waited for room to answer, or for its place in the stream, may go on.
                self.obey(client);
                self.schedule.offer(client);
                continue;
            }
            soon = false;
            let much = !gather.has_room();
            if let Err(e) = gather.write(&mut writer).await {
                return e.to_string();
            }
            if much {
                tokio::task::yield_now().await;
            }
        }
    }
}

/// What a stranger turned out to be.
enum Admission {
    /// A browser or monitor, which has its answer.
    Answered,
    Session(Attachment, Stream, Decoder, Welcome),
    Watch(Stream, Welcome),
    Give(Stream, Arc<Exposure>, (Capability, u64, u64)),
}

/// A session's connection: its session is without one when this is gone, however that came.
struct Attachment {
    server: Arc<Server>,
    client: Arc<Client>,
    epoch: u64,
}

impl Drop for Attachment {
    fn drop(&mut self) {
        self.server.registry.lost(&self.client, self.epoch, self.server.now());
        // Perhaps nobody else has it any more.
        if self.client.is_over() {
            dropped(self.client.clone());
        }
    }
}

/// Frees something elsewhere: much memory takes its time, and this thread has other things to do.
fn dropped<T: Send + 'static>(what: T) {
    let _ = std::thread::Builder::new().name("kiln-drop".into()).spawn(move || {
        // What else holds it lets go of it meanwhile.
        std::thread::sleep(Duration::from_millis(20));
        drop(what);
        trim();
    });
}

/// Gives what was freed back to the system: the C library keeps it, for each thread apart, and a session that is over would
/// go on counting against the machine.
#[allow(unsafe_code)]
fn trim() {
    static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let turn = TURN.try_lock();
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    if turn.is_ok() {
        // SAFETY: it moves nothing that is in use.
        unsafe { libc::malloc_trim(0) };
    }
    drop(turn);
}

/// The last words on a connection.
async fn farewell(stream: &mut Stream, words: &[u8]) -> io::Result<()> {
    stream.write_all(words).await?;
    stream.shutdown().await
}

/// A loop that must not end, on a thread of its own: when it fails it starts again.
fn supervised_thread(work: impl Fn(), failed: impl Fn()) {
    while std::panic::catch_unwind(std::panic::AssertUnwindSafe(&work)).is_err() {
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(&failed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::greeting::{Hello, Purpose};
    use crate::server::registry::{Config, Rules};
    use crate::server::session::Quota;
    use std::path::Path;

    fn server(rules: Rules) -> Arc<Server> {
        let registry = Registry::new(Config {
            token: None,
            quota: Quota::default(),
            most_sessions: 4,
            lease: Duration::from_secs(1),
            heartbeat: Duration::from_secs(1),
            offered: vec!["none".into()],
            devices: Box::new(|_| None),
            random: Box::new(|bytes| bytes.fill(7)),
        });
        Server::new(registry.with_rules(rules), |_| {})
    }

    async fn answer(rules: Rules, peer: &str, words: Vec<u8>) -> Vec<u8> {
        let tls = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../checks/chaos/tls");
        let acceptor = crate::transport::server_tls(&tls.join("cert.pem"), &tls.join("key.pem")).unwrap();
        let (mut near, far) = tokio::io::duplex(1 << 16);
        near.write_all(&words).await.unwrap();
        let server = server(rules);
        let peer = Peer::tcp(peer.parse().unwrap());
        let greet = tokio::spawn(async move { server.greet(Box::new(far), peer, Some(acceptor)).await });
        let mut heard = vec![0; 4096];
        let n = near.read(&mut heard).await.unwrap();
        heard.truncate(n);
        drop(near);
        greet.await.unwrap();
        heard
    }

    #[tokio::test]
    async fn a_server_with_a_certificate_takes_no_plain_session_from_afar() {
        let (token, program, table) = (Vec::new(), String::new(), Vec::new());
        let versions = crate::protocol::VERSIONS;
        let hello = Hello { versions, token, purpose: Purpose::Watch, compress: false, program, table };
        let hello = control(kind::HELLO, &hello.encode());
        let upgrade = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
            Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
        let (far, near) = ("192.0.2.1:5", "127.0.0.1:5");
        let kind_of = |frame: &[u8]| frame[16];
        let refused = answer(Rules::default(), far, hello.clone()).await;
        assert_eq!(kind_of(&refused), kind::REFUSED);
        let reason = Refusal::decode(&refused[frame::HEAD..]).unwrap().to_string();
        assert!(reason.contains("TLS"), "{reason}");
        assert!(answer(Rules::default(), far, upgrade.to_vec()).await.starts_with(b"HTTP/1.1 403"));
        let health = answer(Rules::default(), far, b"GET /healthz HTTP/1.1\r\n\r\n".to_vec()).await;
        assert!(health.starts_with(b"HTTP/1.1 200"));
        let plain = Rules { allow_plain: true, ..Rules::default() };
        for (rules, peer) in [(Rules::default(), near), (plain, far)] {
            assert_eq!(kind_of(&answer(rules.clone(), peer, hello.clone()).await), kind::WELCOME, "{peer}");
            assert!(answer(rules, peer, upgrade.to_vec()).await.starts_with(b"HTTP/1.1 101"), "{peer}");
        }
    }

    #[tokio::test]
    async fn looking_often_costs_no_more_than_looking_once() {
        let server = server(Rules::default());
        assert!(Arc::ptr_eq(&server.look(), &server.look()));
    }

    #[tokio::test]
    async fn a_loop_that_fails_starts_again() {
        let server = server(Rules::default());
        let runs = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let count = runs.clone();
        let work = move || {
            let run = count.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            async move { assert!(run >= 2, "on purpose") }
        };
        tokio::time::timeout(Duration::from_secs(20), server.supervised("test", work)).await.unwrap();
        assert_eq!(runs.load(std::sync::atomic::Ordering::SeqCst), 3);
    }

    #[test]
    fn refusals_of_strangers_fill_no_disk() {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let (kept, quiet) = (lines.clone(), server(Rules::default()));
        let quiet = Arc::into_inner(quiet).unwrap();
        let log = Box::new(move |event: Event<'_>| kept.lock().unwrap().push(format!("{event:?}")));
        let quiet = Server { log, ..quiet };
        (0..100_000).for_each(|_| quiet.refused("somebody", "no token"));
        let told = lines.lock().unwrap().len();
        assert!(told > 0 && told <= 60 * 2 * MOST_LINES as usize, "{told} lines");
    }
}
