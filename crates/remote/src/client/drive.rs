//! What keeps a session connected: connections one after another, to one server or the next.

use super::core::{Core, Step};
use super::remote::Shared;
use crate::address::Address;
use crate::protocol::frame::Decoder;
use crate::protocol::greeting::Refusal;
use crate::transport::{self, Gather, Stream};
use kiln_device::Error;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};

/// How long an acknowledgement may wait for company.
const ACK_DELAY: Duration = Duration::from_millis(5);
/// The longest that connecting and being welcomed may take.
const HANDSHAKE: Duration = Duration::from_secs(5);

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
    /// No other attempt would do better.
    Final(Error),
}

/// Keeps the session connected until the device is dropped or fails.
pub(super) async fn drive(shared: Arc<Shared>) {
    let mut at = 0;
    let mut elsewhere = false;
    let mut lost: Option<Instant> = None;
    let mut attempts = 0u32;
    loop {
        let mut welcomed = false;
        let end = connection(&shared, &shared.addresses[at], elsewhere, &mut welcomed).await;
        shared.lock().disconnected();
        if welcomed {
            (lost, attempts, elsewhere) = (None, 0, false);
        }
        match end {
            End::Closed => return,
            End::Final(error) => return shared.fail(error),
            End::Forgotten => {
                elsewhere = true;
                continue;
            }
            _ if shared.is_closed() || shared.lock().failure().is_some() => {
                // The server's last word was that it is over: whoever waits is told.
                shared.settle();
                shared.room.notify_all();
                return;
            }
            End::Leaving => {
                at = (at + 1) % shared.addresses.len();
                elsewhere = true;
            }
            End::Broken(reason) => {
                let since = *lost.get_or_insert_with(Instant::now);
                // Nobody waits for a server that was never there.
                let patience =
                    if shared.lock().info().is_some() { shared.patience.give_up } else { Duration::ZERO };
                attempts += 1;
                let tried_all = attempts as usize >= shared.addresses.len();
                if since.elapsed() >= patience && tried_all {
                    let peer = shared.addresses.iter().map(Address::to_string).collect::<Vec<_>>().join(",");
                    return shared.fail(Error::Disconnected { peer, reason });
                }
                // The same server first; when it does not answer, the next.
                let gone = attempts >= 2 || shared.lock().info().is_none();
                if gone && shared.addresses.len() > 1 {
                    at = (at + 1) % shared.addresses.len();
                    elsewhere = true;
                }
                let pause = Duration::from_millis(10 << attempts.min(6));
                tokio::time::sleep(pause.min(Duration::from_millis(500))).await;
            }
        }
    }
}

/// One connection, from the first byte to its end.
async fn connection(shared: &Shared, address: &Address, elsewhere: bool, welcomed: &mut bool) -> End {
    let broken = |e: io::Error| End::Broken(e.to_string());
    let shake = async {
        let stream = transport::connect(address).await?;
        let (mut reader, mut writer) = tokio::io::split(stream);
        let hello = shared.lock().hello(elsewhere);
        writer.write_all(&hello).await?;
        writer.flush().await?;
        let mut decoder = Decoder::default();
        loop {
            let step = {
                let frame = decoder.next().map_err(io::Error::other)?;
                frame.map(|frame| shared.lock().receive(&frame)).transpose().map_err(io::Error::other)?
            };
            if let Some(step) = step {
                return Ok((reader, writer, decoder, step));
            }
            read(&mut reader, &mut decoder).await?;
        }
    };
    let (reader, writer, decoder, step) = match tokio::time::timeout(HANDSHAKE, shake).await {
        Err(_) => return End::Broken(format!("no answer within {HANDSHAKE:?}")),
        Ok(Err(e)) => return broken(e),
        Ok(Ok(parts)) => parts,
    };
    match step {
        Step::Refused(Refusal::Session | Refusal::Fenced) => return End::Forgotten,
        Step::Refused(refusal @ (Refusal::Full(_) | Refusal::Draining)) => {
            return End::Broken(refusal.to_string());
        }
        Step::Refused(refusal) => {
            let (peer, reason) = (address.to_string(), refusal.to_string());
            return End::Final(Error::Refused { peer, reason });
        }
        Step::Leave => return End::Leaving,
        Step::Going | Step::Opened(_) => {}
    }
    *welcomed = true;
    let mut reach = shared.lock().reach();
    if reach.url.is_empty() {
        reach.url = Address { device: String::new(), ..address.clone() }.to_string();
    }
    *shared.reach.lock().unwrap_or_else(|e| e.into_inner()) = reach;
    shared.settle();
    shared.room.notify_all();
    let heard = Mutex::new(Instant::now());
    tokio::select! {
        end = receive(shared, reader, decoder, &heard) => end,
        end = send(shared, writer) => end,
        end = watch(shared, &heard) => end,
    }
}

async fn read(reader: &mut ReadHalf<Stream>, decoder: &mut Decoder) -> io::Result<()> {
    match reader.read(decoder.next_room()).await? {
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
                Ok(Step::Going) => {}
                // With nowhere else to go, it stays for its answers.
                Ok(Step::Leave) if shared.addresses.len() == 1 && shared.lock().failure().is_none() => {}
                Ok(Step::Leave) => return End::Leaving,
                Ok(_) => return End::Broken("the server greets twice".into()),
                Err(e) => return End::Broken(e.to_string()),
            }
        }
        if decoder.heard() {
            *heard.lock().unwrap_or_else(|e| e.into_inner()) = Instant::now();
        }
        shared.settle();
        shared.room.notify_all();
        if let Err(e) = read(&mut reader, &mut decoder).await {
            return End::Broken(e.to_string());
        }
    }
}

async fn send(shared: &Shared, mut writer: WriteHalf<Stream>) -> End {
    let mut gather = Gather::default();
    let mut soon = false;
    loop {
        if shared.is_closed() {
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
