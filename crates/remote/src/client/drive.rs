//! What keeps a session connected: connections one after another, to one server or the next.

use super::core::{Core, FrameOutcome};
use super::remote::{Server, Shared};
use crate::address::Address;
use crate::protocol::frame::Decoder;
use crate::protocol::greeting::Refusal;
use crate::protocol::plain;
use crate::transport::{self, Gather, Stream};
use kiln_device::Error;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};

/// How long an acknowledgement may wait for company.
const ACK_DELAY: Duration = Duration::from_millis(5);
/// The longest that connecting and being welcomed may take.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// How long a server is tried that takes connections and says nothing: a crowd of strangers may push each other out.
const CROWDED: Duration = Duration::from_secs(1);

/// What a server means that wants a token from a client without one.
const NO_TOKEN: &str =
    "it wants a token, and none was given: ?token-file=FILE in the address or KILN_TOKEN names one";

/// A server's refusal, for a client that gave this token.
pub(super) fn told(refusal: &Refusal, token: &[u8]) -> String {
    match refusal {
        Refusal::Token if token.is_empty() => NO_TOKEN.into(),
        refusal => plain(&refusal.to_string()),
    }
}

/// Why a connection ended.
enum End {
    /// The device was dropped.
    Closed,
    /// It broke, or the server went away: another is tried.
    Broken(String),
    /// The session is not there any more: a new one is opened.
    Forgotten,
    /// The server asks to go elsewhere.
    Leaving,
    /// Asking this server again would not help.
    Refused(Error),
}

/// Why a server could not be had.
enum Why {
    /// It was not reached, or had no room.
    Away(String),
    /// It will not have this client.
    Refused(Error),
}

/// Where a client stands with its servers.
#[derive(Default)]
struct Search {
    /// The server that is tried.
    at: usize,
    /// The server that has the session.
    home: Option<usize>,
    /// Since when there has been no connection, and what was tried meanwhile.
    lost: Option<Instant>,
    attempts: usize,
    why: Vec<Option<Why>>,
    /// A server took the connection, though it said nothing.
    reached: bool,
    /// That the server is lost has been told, and that it is back.
    told: [bool; 2],
}

impl Search {
    fn refused(&self, server: usize) -> bool {
        matches!(self.why[server], Some(Why::Refused(_)))
    }

    /// The next server that has not refused.
    fn next(&mut self) {
        let count = self.why.len();
        let others = (1..=count).map(|step| (self.at + step) % count);
        self.at = others.into_iter().find(|&server| !self.refused(server)).unwrap_or(self.at);
    }

    /// What the device fails with when no server is to be had.
    fn error(self, shared: &Shared) -> Error {
        let refused = (0..self.why.len()).all(|server| self.refused(server));
        let mut reasons = Vec::new();
        for (server, why) in shared.servers.iter().zip(self.why) {
            reasons.push(match why {
                // What to do about it is in its type.
                Some(Why::Refused(error @ Error::NumericsDiffer { .. })) => return error,
                Some(Why::Refused(error)) if shared.servers.len() == 1 => return error,
                Some(Why::Refused(Error::Refused { reason, .. })) => (&server.address, reason),
                Some(Why::Refused(error)) => (&server.address, error.to_string()),
                Some(Why::Away(reason)) => (&server.address, reason),
                None => continue,
            });
        }
        let (peer, reason) = match &mut reasons[..] {
            [(_, reason)] => (shared.peer(), std::mem::take(reason)),
            reasons => {
                let each: Vec<_> =
                    reasons.iter().map(|(server, reason)| format!("{server}: {reason}")).collect();
                (shared.peer(), each.join("; "))
            }
        };
        match refused {
            true => Error::Refused { peer, reason },
            false => Error::Disconnected { peer, reason },
        }
    }
}

/// Keeps the session connected until the device is dropped or fails.
pub(super) async fn drive(shared: Arc<Shared>) {
    let count = shared.servers.len();
    let empty = || Search { why: (0..count).map(|_| None).collect(), ..Search::default() };
    let mut search = empty();
    loop {
        let (begun, before) = (Instant::now(), shared.lock().progress());
        let end = connection(&shared, &mut search).await;
        let welcomed = shared.disconnected();
        shared.lock().disconnected();
        // A server that takes every connection and ends it without a word is as good as none.
        if welcomed && (shared.lock().progress() > before || begun.elapsed() > HANDSHAKE) {
            search = Search { at: search.at, home: search.home, ..empty() };
        }
        match end {
            End::Closed => {
                shared.settle();
                shared.changed.notify_all();
                return;
            }
            End::Forgotten => {
                search.home = None;
                continue;
            }
            _ if shared.is_closed() || shared.lock().failure().is_some() => {
                // The server's last word was that it is over: whoever waits is told.
                shared.settle();
                shared.changed.notify_all();
                return;
            }
            End::Leaving => {
                search.home = None;
                search.next();
            }
            End::Refused(error) => {
                let reason = error.to_string();
                search.why[search.at] = Some(Why::Refused(error));
                search.attempts += 1;
                if (0..count).all(|server| search.refused(server)) || search.is_over(&shared) {
                    return shared.fail(search.error(&shared));
                }
                search.tell(&shared, &reason);
                search.next();
            }
            End::Broken(reason) => {
                search.attempts += 1;
                search.tell(&shared, &reason);
                search.why[search.at] = Some(Why::Away(reason));
                if search.is_over(&shared) {
                    return shared.fail(search.error(&shared));
                }
                // The same server first; when it does not answer, the next.
                if search.attempts >= 2 || shared.lock().info().is_none() {
                    search.next();
                }
                let pause = Duration::from_millis(10 << search.attempts.min(6));
                tokio::select! {
                    () = tokio::time::sleep(pause.min(Duration::from_millis(500))) => {}
                    () = shared.closing() => {}
                }
            }
        }
    }
}

impl Search {
    /// Whether it is time to give up.
    fn is_over(&mut self, shared: &Shared) -> bool {
        let since = *self.lost.get_or_insert_with(Instant::now);
        // Nobody waits for a server that was never there. One that had no room may have some soon.
        let patience = match (shared.lock().info().is_some(), self.reached) {
            (true, _) => shared.patience.give_up,
            (false, true) => CROWDED.min(shared.patience.give_up),
            (false, false) => Duration::ZERO,
        };
        since.elapsed() >= patience && self.attempts >= self.why.len()
    }

    /// Tells once that the server is lost. A connection that is there again at the first try is no news.
    fn tell(&mut self, shared: &Shared, reason: &str) {
        if self.attempts >= 2 && !self.told[0] && shared.lock().info().is_some() {
            self.told[0] = true;
            let text =
                format!("{} is lost: {reason}; trying for {:?}", shared.home(), shared.patience.give_up);
            shared.lock().tell(text, true);
            shared.settle();
        }
    }
}

/// One connection, from the first byte to its end.
async fn connection(shared: &Shared, search: &mut Search) -> End {
    let Server { address, login } = &shared.servers[search.at];
    let (elsewhere, begun) = (search.home != Some(search.at), shared.lock().info().is_some());
    let broken = |e: io::Error| End::Broken(e.to_string());
    let reached = AtomicBool::new(false);
    let shake = async {
        let stream = transport::connect(address).await?;
        reached.store(true, Ordering::Relaxed);
        let (mut reader, mut writer) = tokio::io::split(stream);
        let hello = shared.lock().hello(login, elsewhere);
        writer.write_all(&hello).await?;
        writer.flush().await?;
        let mut decoder = Decoder::default();
        loop {
            let step = {
                let frame = decoder.next().map_err(io::Error::other)?;
                frame.map(|frame| shared.lock().receive(&frame)).transpose().map_err(io::Error::other)?
            };
            if let Some(step) = step {
                if matches!(step, FrameOutcome::Unfit(_)) || shared.lock().failure().is_some() {
                    // It has opened a session that nobody needs.
                    writer.write_all(&Core::bye()).await?;
                    writer.shutdown().await?;
                }
                return Ok((reader, writer, decoder, step));
            }
            read(&mut reader, &mut decoder).await?;
        }
    };
    let shaken = tokio::select! {
        shaken = tokio::time::timeout(HANDSHAKE, shake) => shaken,
        () = shared.closing() => return End::Closed,
    };
    let (reader, writer, decoder, step) = match shaken {
        Err(_) => return End::Broken(format!("no answer within {HANDSHAKE:?}")),
        Ok(Err(e)) => {
            search.reached |= reached.load(Ordering::Relaxed);
            return broken(e);
        }
        Ok(Ok(parts)) => parts,
    };
    let opened = match step {
        FrameOutcome::Refused(Refusal::Session | Refusal::Fenced) if !elsewhere => return End::Forgotten,
        FrameOutcome::Refused(refusal @ (Refusal::Full(_) | Refusal::Draining)) => {
            return End::Broken(refusal.to_string());
        }
        FrameOutcome::Refused(refusal) => {
            let reason = told(&refusal, &login.token);
            return End::Refused(Error::Refused { peer: address.to_string(), reason });
        }
        FrameOutcome::Unfit(Error::NumericsDiffer { want, got, .. }) => {
            return End::Refused(Error::NumericsDiffer { peer: address.to_string(), want, got: plain(&got) });
        }
        FrameOutcome::Unfit(error) => return End::Refused(error),
        FrameOutcome::Leave => return End::Leaving,
        FrameOutcome::Going => false,
        FrameOutcome::Opened(new) => new,
    };
    search.home = Some(search.at);
    if shared.lock().failure().is_some() {
        return End::Closed;
    }
    if begun && (opened || search.told[0]) && !search.told[1] {
        search.told[1] = true;
        let since = search.lost.map_or(Duration::ZERO, |since| since.elapsed());
        let (home, session) = (shared.home(), if opened { ", with its session rebuilt" } else { "" });
        let text = match home == address.to_string() {
            true => format!("{home} is back after {since:.1?}{session}"),
            false => format!("{address} stands in for {home} after {since:.1?}{session}"),
        };
        shared.lock().tell(text, true);
    }
    let mut reach = shared.lock().reach();
    let url = Address { device: String::new(), ..address.clone() }.to_string();
    if reach.url.is_empty() {
        reach.url = url;
    }
    *shared.reach.lock().unwrap_or_else(|e| e.into_inner()) = reach;
    shared.welcomed(search.at);
    shared.settle();
    shared.changed.notify_all();
    let heard = Mutex::new(Instant::now());
    tokio::select! {
        end = receive(shared, reader, decoder, &heard) => end,
        end = send(shared, writer) => end,
        end = watch(shared, &heard) => end,
    }
}

async fn read(reader: &mut ReadHalf<Stream>, decoder: &mut Decoder) -> io::Result<()> {
    match reader.read(decoder.spare_for_frame()).await? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        n => {
            decoder.filled(n);
            Ok(())
        }
    }
}

async fn receive(
    shared: &Shared,
    mut reader: ReadHalf<Stream>,
    mut decoder: Decoder,
    heard: &Mutex<Instant>,
) -> End {
    loop {
        loop {
            let step = match decoder.next() {
                Ok(Some(frame)) => shared.lock().receive(&frame),
                Ok(None) => break,
                Err(e) => Err(e),
            };
            match step {
                Ok(FrameOutcome::Going) => {}
                // With nowhere else to go, it stays for its answers.
                Ok(FrameOutcome::Leave) if shared.servers.len() == 1 && shared.lock().failure().is_none() => {
                }
                Ok(FrameOutcome::Leave) => return End::Leaving,
                Ok(_) => return End::Broken("the server greets twice".into()),
                Err(e) => return End::Broken(e.to_string()),
            }
        }
        if decoder.heard() {
            *heard.lock().unwrap_or_else(|e| e.into_inner()) = Instant::now();
        }
        shared.settle();
        shared.changed.notify_all();
        if let Err(e) = read(&mut reader, &mut decoder).await {
            return End::Broken(e.to_string());
        }
    }
}

async fn send(shared: &Shared, mut writer: WriteHalf<Stream>) -> End {
    let mut gather = Gather::default();
    let mut soon = false;
    loop {
        if shared.is_closed() || shared.lock().failure().is_some() {
            let _ = writer.write_all(&Core::bye()).await;
            let _ = writer.shutdown().await;
            return End::Closed;
        }
        let owes = {
            let mut core = shared.lock();
            core.controls(soon, gather.controls());
            while gather.has_room()
                && let Some(out) = core.next()
            {
                gather.push(out);
            }
            core.owes()
        };
        if gather.is_empty() {
            // An acknowledgement waits a little for others.
            let woken = shared.wake.notified();
            if owes {
                soon = tokio::time::timeout(ACK_DELAY, woken).await.is_err();
            } else {
                woken.await;
            }
            continue;
        }
        soon = false;
        if let Err(e) = gather.load() {
            let path = "a file with a snapshot of this session".into();
            shared.fail(Error::File { path, message: e.to_string() });
            continue;
        }
        if let Err(e) = gather.write(&mut writer).await {
            return End::Broken(e.to_string());
        }
    }
}

/// Asks a silent server for a sign of life.
async fn watch(shared: &Shared, heard: &Mutex<Instant>) -> End {
    let wanted = shared.lock().heartbeat();
    let beat = wanted.map_or(shared.patience.heartbeat, |wanted| wanted.min(shared.patience.heartbeat));
    loop {
        tokio::time::sleep(beat).await;
        let silent = heard.lock().unwrap_or_else(|e| e.into_inner()).elapsed();
        if silent > 3 * beat {
            return End::Broken(format!("it has been silent for {silent:.1?}"));
        }
        shared.lock().ping();
        shared.wake.notify_one();
    }
}
