//! The server's connections: one port for tensors, browsers and monitors.

use super::fetch::MOST_GIVEN;
use super::http;
use super::listen::Bound;
use super::registry::{Admitted, Client, Registry};
use super::schedule::Schedule;
use super::session::Step;
use crate::client::core::control;
use crate::protocol::frame::{self, Decoder};
use crate::protocol::message::{Message, kind};
use crate::transport::{Gather, Rewound, Stream};
use rustc_hash::FxHashMap;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio_rustls::TlsAcceptor;

/// How long a stranger has for a complete hello.
const HELLO: Duration = Duration::from_secs(5);
/// The longest hello: it holds an operation table.
const MOST_HELLO: usize = 256 << 10;
/// How long an acknowledgement may wait for company.
const ACK_DELAY: Duration = Duration::from_millis(5);
/// How long a server that drains must have had nothing to do before it goes.
const QUIET: Duration = Duration::from_millis(200);
/// How long a client with a wrong token waits for the answer.
const WRONG_TOKEN: Duration = Duration::from_millis(200);
/// Wrong tokens within [`FORGIVEN`] that make a host suspect: it is heard once in [`WRONG_TOKEN`] from then on.
const SUSPECT: u32 = 10;
/// After how long without a wrong token a host is trusted again.
const FORGIVEN: Duration = Duration::from_secs(10);
/// Hosts whose wrong tokens are counted.
const MOST_SUSPECTS: usize = 1024;
/// Connections that may be between their first byte and their welcome.
const MOST_STRANGERS: usize = 512;

/// A running server.
pub struct Server {
    /// Its sessions.
    pub registry: Registry,
    pub(super) schedule: Schedule,
    start: Instant,
    pub(super) log: Box<dyn Fn(Event<'_>) + Send + Sync>,
    strangers: tokio::sync::Semaphore,
    pub(super) giving: tokio::sync::Semaphore,
    /// Wrong tokens by host, and when the last one came.
    suspects: Mutex<FxHashMap<String, (u32, Instant)>>,
    /// Suspects are heard one after another.
    hearing: tokio::sync::Mutex<()>,
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
    Draining {
        sessions: usize,
    },
    /// Connections cannot be taken at present.
    Starved {
        reason: &'a str,
    },
}

impl Server {
    /// A server that tells `log` what happens.
    pub fn new(registry: Registry, log: impl Fn(Event<'_>) + Send + Sync + 'static) -> Arc<Server> {
        Arc::new(Server {
            registry,
            schedule: Schedule::default(),
            start: Instant::now(),
            log: Box::new(log),
            strangers: tokio::sync::Semaphore::new(MOST_STRANGERS),
            giving: tokio::sync::Semaphore::new(MOST_GIVEN),
            suspects: Mutex::default(),
            hearing: tokio::sync::Mutex::new(()),
        })
    }

    /// Time since the start.
    pub fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// Serves until `stop` is ready, then lets sessions finish what they have sent, for at most `grace`.
    pub async fn run(
        self: &Arc<Server>,
        bound: Bound,
        workers: usize,
        stop: impl Future<Output = ()>,
        grace: Duration,
    ) {
        let workers: Vec<_> = (0..workers.max(1))
            .filter_map(|i| {
                let server = self.clone();
                std::thread::Builder::new()
                    .name(format!("kiln-work-{i}"))
                    .spawn(move || server.schedule.serve())
                    .ok()
            })
            .collect();
        let mut tasks = tokio::task::JoinSet::new();
        for listener in bound.tcp {
            tasks.spawn(self.clone().accept_tcp(listener, bound.tls.clone()));
        }
        for (listener, path) in bound.unix {
            tasks.spawn(self.clone().accept_unix(listener, path));
        }
        tasks.spawn(self.clone().housekeeping());
        // Workers end with this call, however it ends.
        struct Stop<'a>(&'a Schedule);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.stop();
            }
        }
        let working = Stop(&self.schedule);
        stop.await;
        self.drain(grace).await;
        tasks.shutdown().await;
        drop(working);
        let join = tokio::task::spawn_blocking(move || workers.into_iter().for_each(|w| drop(w.join())));
        let _ = tokio::time::timeout(grace, join).await;
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

    /// Ends sessions whose lease is over.
    async fn housekeeping(self: Arc<Server>) {
        loop {
            tokio::time::sleep(Duration::from_millis(100)).await;
            let gone = self.registry.expire(self.now());
            self.registry.moves().expire(|session| self.registry.is_open(session));
            for client in &gone {
                let reason = client.reason();
                let reason = reason.as_deref().unwrap_or("its lease is over, or it said goodbye");
                (self.log)(Event::Ended { session: client.number, reason });
            }
            // Freeing much memory takes its time, and this thread has other things to do.
            if !gone.is_empty() {
                let _ = std::thread::Builder::new().name("kiln-drop".into()).spawn(move || drop(gone));
            }
        }
    }

    /// Finds out what a connection wants.
    pub(super) async fn greet(
        self: &Arc<Server>,
        stream: Stream,
        peer: &str,
        tls: Option<TlsAcceptor>,
        trusted: bool,
    ) {
        // A crowd of strangers waits its turn; those who are slow make room when their time is over.
        let Ok(Ok(stranger)) = tokio::time::timeout(HELLO, self.strangers.acquire()).await else { return };
        let hello = tokio::time::timeout(HELLO, self.hello(stream, tls)).await;
        drop(stranger);
        let outcome = match hello {
            Err(_) => Err(io::Error::other("no hello in time")),
            Ok(Err(e)) => Err(e),
            Ok(Ok(Hello::Answered)) => return,
            Ok(Ok(Hello::Frames(stream, decoder, payload))) => {
                self.admit(stream, decoder, &payload, peer, trusted).await
            }
        };
        if let Err(e) = outcome {
            (self.log)(Event::Refused { peer, reason: &e.to_string() });
        }
    }

    async fn hello(&self, mut stream: Stream, tls: Option<TlsAcceptor>) -> io::Result<Hello> {
        let mut tls = tls;
        loop {
            let mut first = [0; 4];
            stream.read_exact(&mut first).await?;
            let rewound: Stream = Box::new(Rewound::new(first.to_vec(), stream));
            if first[0] == 0x16 && first[1] == 3 {
                let acceptor = tls.take().ok_or_else(|| io::Error::other("TLS where none is set up"))?;
                stream = Box::new(acceptor.accept(rewound).await?);
            } else if first == *b"GET " || first == *b"HEAD" {
                match http::serve(self, rewound).await? {
                    Some(upgraded) => stream = upgraded,
                    None => return Ok(Hello::Answered),
                }
            } else {
                stream = rewound;
                break;
            }
        }
        let mut decoder = Decoder::default();
        loop {
            let len = match decoder.next().map_err(io::Error::other)? {
                Some(frame) if frame.kind == kind::HELLO => Some(frame.payload.to_vec()),
                Some(_) => return Err(io::Error::other("the first frame is no hello")),
                None => None,
            };
            if let Some(payload) = len {
                return Ok(Hello::Frames(stream, decoder, payload));
            }
            if decoder.missing() > MOST_HELLO + frame::HEAD {
                return Err(io::Error::other("the first frame is too long"));
            }
            let room = decoder.room(16 << 10);
            match stream.read(room).await? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => decoder.filled(n),
            }
        }
    }

    async fn admit(
        self: &Arc<Server>,
        mut stream: Stream,
        decoder: Decoder,
        payload: &[u8],
        peer: &str,
        trusted: bool,
    ) -> io::Result<()> {
        let host = peer.rsplit_once(':').map_or(peer, |(host, _)| host);
        if !trusted && self.is_suspect(host) {
            let _turn = self.hearing.lock().await;
            tokio::time::sleep(WRONG_TOKEN).await;
        }
        let (welcome, admitted) = match self.registry.hello(payload, trusted, self.now()) {
            Ok(admitted) => admitted,
            Err(refusal) => {
                if refusal == crate::protocol::Refusal::Token {
                    self.suspect(host);
                    tokio::time::sleep(WRONG_TOKEN).await;
                }
                let _ = stream.write_all(&control(kind::REFUSED, &refusal.encode())).await;
                let _ = stream.shutdown().await;
                return Err(io::Error::other(refusal));
            }
        };
        if let Admitted::Fetch(capability, transfer, from) = admitted {
            return self.give(stream, &welcome, (capability, transfer, from)).await;
        }
        let resumed = welcome.resumed.is_some();
        let (reader, mut writer) = tokio::io::split(stream);
        let greeted = async {
            writer.write_all(&control(kind::WELCOME, &welcome.encode())).await?;
            writer.flush().await
        };
        let greeted = greeted.await;
        let (client, epoch) = match admitted {
            Admitted::Session(client, epoch) => (client, epoch),
            Admitted::Watch => return self.watched(writer).await,
            Admitted::Fetch(..) => return Ok(()),
        };
        let session = client.number;
        (self.log)(match resumed {
            true => Event::Resumed { session, peer },
            false => Event::Opened { session, program: &client.program, peer },
        });
        let end = match greeted {
            Err(e) => e.to_string(),
            Ok(()) => tokio::select! {
                end = self.receive(&client, epoch, reader, decoder) => end,
                end = self.send(&client, epoch, writer) => end,
            },
        };
        if client.is_current(epoch) {
            (self.log)(Event::Lost { session, reason: &end });
        }
        self.registry.lost(&client, epoch, self.now());
        Ok(())
    }

    /// Whether many wrong tokens came from a host lately.
    fn is_suspect(&self, host: &str) -> bool {
        let suspects = self.suspects.lock().unwrap_or_else(|e| e.into_inner());
        suspects.get(host).is_some_and(|(count, last)| *count >= SUSPECT && last.elapsed() < FORGIVEN)
    }

    /// Notes a wrong token.
    fn suspect(&self, host: &str) {
        let mut suspects = self.suspects.lock().unwrap_or_else(|e| e.into_inner());
        suspects.retain(|_, (_, last)| last.elapsed() < FORGIVEN);
        if suspects.len() < MOST_SUSPECTS {
            let entry = suspects.entry(host.into()).or_insert((0, Instant::now()));
            *entry = (entry.0.saturating_add(1), Instant::now());
        }
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
                    Ok(Some(frame)) => client.session().receive(&frame),
                    Err(e) => return e.to_string(),
                };
                match step {
                    Ok(Step::Going) => {}
                    Ok(Step::Ping(n)) => client.session().pong(n),
                    Ok(Step::Ended) => {
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
            let room = decoder.next_room();
            match tokio::time::timeout_at(heard + patience, reader.read(room)).await {
                Err(_) => return format!("silent for {patience:?}"),
                Ok(Ok(0)) => return "the connection ended".into(),
                Ok(Ok(n)) => decoder.filled(n),
                Ok(Err(e)) => return e.to_string(),
            }
        }
    }

    async fn send(&self, client: &Arc<Client>, epoch: u64, mut writer: WriteHalf<Stream>) -> String {
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
            let owes = {
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
                session.owes()
            };
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
                // What waited for room to answer may go on.
                self.schedule.offer(client);
                continue;
            }
            soon = false;
            if let Err(e) = gather.write(&mut writer).await {
                return e.to_string();
            }
        }
    }
}

enum Hello {
    /// It was a browser, and has its answer.
    Answered,
    Frames(Stream, Decoder, Vec<u8>),
}
