//! Values on their way between servers: one connection per fetch, the bytes straight into the waiting session's memory.

use super::moves::{Exposure, Fetch, Order};
use super::registry::Client;
use super::serve::{Event, HELLO, Server};
use crate::address::Address;
use crate::protocol::VERSIONS;
use crate::protocol::frame::Decoder;
use crate::protocol::frame::control;
use crate::protocol::greeting::{Hello, Purpose, Refusal, Welcome};
use crate::protocol::link::Out;
use crate::protocol::message::{self, Capability, Message, kind};
use crate::transport::{self, Gather, Stream};
use kiln_device::{Data, Error};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Fetches of a session that run at once; the others wait for their turn.
const MOST_FETCHES: usize = 16;
/// Fetches of others that are served at once.
pub const MOST_GIVEN: usize = 512;
/// How long connecting may take.
const CONNECT: Duration = Duration::from_secs(5);
/// Broken connections in a row, without a byte of progress, after which a fetch is given up.
const MOST_FAILURES: u32 = 3;

/// The fetches of a session. They run in the order of its stream: what the first one waits for never waits for a later
/// one, nor for another session's turn, so that no circle of servers stands still.
#[derive(Default)]
pub struct Fetches {
    running: usize,
    waiting: VecDeque<Fetch>,
}

/// Why a fetch did not come to its end.
enum Stop {
    /// The connection broke: another may do better.
    Broken(io::Error),
    /// The source does not give the value.
    Refused(String),
}

/// Why a value does not come directly.
enum Way {
    /// It was never tried, for this reason.
    Barred(String),
    /// It was.
    Failed(String),
}

impl<E: Into<io::Error>> From<E> for Stop {
    fn from(e: E) -> Stop {
        Stop::Broken(e.into())
    }
}

impl Server {
    /// Does what a session wants of its server.
    pub(super) fn obey(self: &Arc<Server>, client: &Arc<Client>) {
        let orders = client.session().orders();
        for order in orders {
            let (server, client) = (self.clone(), client.clone());
            match order {
                Order::Announce(capability) => {
                    if !self.registry.moves().announce(client.number, capability) {
                        client.end_because("too many values are exposed");
                    }
                }
                Order::Fetch(fetch) => {
                    let mut fetches = client.fetches.lock().unwrap_or_else(|e| e.into_inner());
                    fetches.waiting.push_back(fetch);
                }
                Order::Recall(request, capability) => {
                    tokio::spawn(async move {
                        let unknown = Error::Peer { message: Refusal::Capability.to_string() };
                        let value = server.shown(&capability, Some(client.number)).await;
                        client.session().recalled(request, value.unwrap_or(Err(unknown)));
                        server.obey(&client);
                        client.news.notify_one();
                    });
                }
            }
        }
        self.start_fetches(client);
    }

    /// Begins what may be fetched now, in the order of the stream.
    pub(super) fn start_fetches(self: &Arc<Server>, client: &Arc<Client>) {
        let mut fetches = client.fetches.lock().unwrap_or_else(|e| e.into_inner());
        while fetches.running < MOST_FETCHES
            && let Some(fetch) = fetches.waiting.front()
            && client.session().begin_fetch(fetch.transfer, fetch.incarnation == self.registry.incarnation())
            && let Some(fetch) = fetches.waiting.pop_front()
        {
            fetches.running += 1;
            let (server, client) = (self.clone(), client.clone());
            tokio::spawn(async move {
                server.fetch(&client, fetch).await;
                client.fetches.lock().unwrap_or_else(|e| e.into_inner()).running -= 1;
                server.start_fetches(&client);
            });
        }
    }

    /// What is exposed, by a certain session if one is named.
    async fn shown(&self, capability: &Capability, by: Option<u64>) -> Option<Result<Data, Error>> {
        let exposure = self.registry.moves().find(capability).await?;
        if by.is_some_and(|session| session != exposure.session()) {
            return None;
        }
        exposure.value().await
    }

    /// Fetches a value for a session that waits for it.
    async fn fetch(&self, client: &Arc<Client>, fetch: Fetch) {
        if fetch.meta.bytes() == 0 {
            return;
        }
        let outcome = if fetch.incarnation == self.registry.incarnation() {
            self.fetch_here(client, &fetch).await
        } else {
            self.fetch_there(client, &fetch).await
        };
        if let Err(way) = outcome {
            let reason = match way {
                Way::Barred(reason) => reason,
                // What else there is to see from here is none of the client's business.
                Way::Failed(reason) => {
                    self.tell(Event::Detour { session: client.number, reason: &reason });
                    "the source gave no value".into()
                }
            };
            client.session().fetch_lost(fetch.transfer, &reason);
        }
        client.news.notify_one();
        self.schedule.offer(client);
    }

    /// From another session of this server: its memory is shared, not sent.
    async fn fetch_here(&self, client: &Client, fetch: &Fetch) -> Result<(), Way> {
        let moves = self.registry.moves();
        let refused = || Way::Barred(Refusal::Capability.to_string());
        let exposure = moves.find(&fetch.capability).await.ok_or_else(refused)?;
        let value = exposure.value().await.ok_or_else(refused)?;
        if !exposure.begin(key(client, fetch)) {
            return Err(refused());
        }
        client.session().fetch_whole(fetch.transfer, value);
        moves.done(&fetch.capability);
        Ok(())
    }

    async fn fetch_there(&self, client: &Client, fetch: &Fetch) -> Result<(), Way> {
        let address = self.registry.moves().allowed(&fetch.url).map_err(Way::Barred)?;
        let mut failures = 0;
        loop {
            let before = client.session().fetched(fetch.transfer);
            match self.fetch_once(client, fetch, &address).await {
                Ok(()) => return Ok(()),
                Err(Stop::Refused(reason)) => return Err(Way::Failed(format!("{address}: {reason}"))),
                Err(Stop::Broken(e)) => {
                    if !client.session().wants(fetch.transfer) {
                        return Ok(());
                    }
                    let further = client.session().fetched(fetch.transfer) > before;
                    failures = if further { 1 } else { failures + 1 };
                    if failures >= MOST_FAILURES || client.is_over() {
                        return Err(Way::Failed(format!("{address}: {e}")));
                    }
                    tokio::time::sleep(Duration::from_millis(20 << failures)).await;
                }
            }
        }
    }

    /// One connection to the source.
    async fn fetch_once(&self, client: &Client, fetch: &Fetch, address: &Address) -> Result<(), Stop> {
        let tls = self.registry.moves().tls();
        let mut stream = within(CONNECT, transport::connect_with(address, tls)).await?;
        let from = client.session().fetched(fetch.transfer) as u64;
        // Nothing that the client has chosen goes to the other side as it is.
        let mut mask = [0; 32];
        (self.registry.config().random)(&mut mask);
        let (capability, transfer) = (fetch.capability, key(client, fetch));
        let purpose = Purpose::Masked { mask, capability, transfer, from };
        let (token, program, table) = (Vec::new(), String::new(), Vec::new());
        let hello = Hello { versions: VERSIONS, token, purpose, compress: false, program, table };
        stream.write_all(&control(kind::HELLO, &hello.encode())).await?;
        let mut decoder = Decoder::default();
        let patience = 3 * self.registry.config().heartbeat;
        loop {
            while let Some(frame) = decoder.next().map_err(io::Error::other)? {
                if client.is_over() {
                    return Err(Stop::Refused("the session is over".into()));
                }
                if frame.kind == kind::WELCOME && fetch.incarnation != 0 {
                    let welcome = Welcome::decode(frame.payload).map_err(io::Error::other)?;
                    if welcome.incarnation != fetch.incarnation {
                        return Err(Stop::Refused("its server is another by now".into()));
                    }
                }
                if matches!(frame.kind, kind::WELCOME | kind::PING) {
                    continue;
                }
                if frame.kind == kind::REFUSED {
                    let refusal = Refusal::decode(frame.payload).map_err(io::Error::other)?;
                    return Err(Stop::Refused(refusal.to_string()));
                }
                let mut scratch = Vec::new();
                let complete = match Message::decode(frame.kind, frame.payload, &mut scratch) {
                    Ok(Message::Value { meta, .. }) if meta == fetch.meta => from as usize == meta.bytes(),
                    Ok(Message::Value { .. }) => return Err(Stop::Refused("it has another shape".into())),
                    Ok(Message::Piece { bytes, .. }) => {
                        client.session().fetch(fetch.transfer, bytes).map_err(io::Error::other)?
                    }
                    Ok(Message::Failed { error, .. }) => {
                        client.session().fetch_whole(fetch.transfer, Err(error));
                        true
                    }
                    _ => return Err(Stop::Refused("it does not speak like a source".into())),
                };
                if complete {
                    // It has its value whether the source hears of it or not.
                    let _ = stream.write_all(&control(kind::BYE, &[])).await;
                    let _ = stream.shutdown().await;
                    return Ok(());
                }
            }
            let spare = decoder.spare_for_frame();
            match within(patience, stream.read(spare)).await? {
                0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                n => decoder.filled(n),
            }
        }
    }

    /// What another server asks for, if it is exposed.
    pub(super) async fn asked(
        &self,
        stream: &mut Stream,
        welcome: &Welcome,
        capability: &Capability,
    ) -> io::Result<Arc<Exposure>> {
        // Who takes it for another start of this server need not wait for what will not come.
        within(HELLO, stream.write_all(&control(kind::WELCOME, &welcome.encode()))).await?;
        let found = self.registry.moves().find(capability).await;
        if found.is_none() {
            within(HELLO, stream.write_all(&refuse(Refusal::Capability))).await?;
        }
        found.ok_or_else(|| io::Error::other(Refusal::Capability))
    }

    /// Gives another server what is exposed.
    pub(super) async fn give(
        &self,
        mut stream: Stream,
        exposure: &Exposure,
        (capability, transfer, from): (Capability, u64, u64),
    ) -> io::Result<()> {
        let Ok(_turn) = self.giving.try_acquire() else {
            return within(HELLO, stream.write_all(&refuse(Refusal::Full(MOST_GIVEN as u64)))).await;
        };
        let beat = self.registry.config().heartbeat;
        let value = loop {
            match tokio::time::timeout(beat, exposure.value()).await {
                Ok(value) => break value,
                // The device has not come to it yet: the other side hears that this one lives.
                Err(_) => within(HELLO, stream.write_all(&control(kind::PING, &[0]))).await?,
            }
        };
        let data = match value {
            Some(Ok(data)) if exposure.begin(transfer) => data,
            Some(Err(error)) => {
                let (kind, body) = Message::Failed { request: transfer, error }.encode();
                return within(HELLO, stream.write_all(&control(kind, &body.fields))).await;
            }
            _ => {
                within(HELLO, stream.write_all(&refuse(Refusal::Capability))).await?;
                return Err(io::Error::other(Refusal::Capability));
            }
        };
        let mut gather = Gather::default();
        let (kind, body) = Message::Value { request: transfer, meta: data.meta }.encode();
        gather.push(Out::control(kind, body));
        let rest = data.bytes.slice((from as usize).min(data.bytes.len())..data.bytes.len());
        for (kind, body) in message::pieces(transfer, &rest, false) {
            gather.push(Out::control(kind, body));
            if !gather.has_room() {
                within(exposure.touch(), gather.write(&mut stream)).await?;
            }
        }
        within(exposure.touch(), gather.write(&mut stream)).await?;
        // The value is held until the other side has it; if it does not say so, until the deadline.
        let mut decoder = Decoder::default();
        loop {
            if let Some(frame) = decoder.next().map_err(io::Error::other)? {
                if frame.kind == kind::BYE {
                    self.registry.moves().done(&capability);
                }
                return Ok(());
            }
            match within(exposure.touch(), stream.read(decoder.spare(64))).await? {
                0 => return Ok(()),
                n => decoder.filled(n),
            }
        }
    }
}

/// The words that refuse.
fn refuse(refusal: Refusal) -> Vec<u8> {
    control(kind::REFUSED, &refusal.encode())
}

/// Names a fetch for its source, so that two sessions are told apart.
fn key(client: &Client, fetch: &Fetch) -> u64 {
    client.number.wrapping_add(fetch.transfer)
}

/// The outcome, or an error if it takes too long.
async fn within<T>(limit: Duration, f: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    match tokio::time::timeout(limit, f).await {
        Ok(outcome) => outcome,
        Err(_) => Err(io::ErrorKind::TimedOut.into()),
    }
}
