//! Looking at a server.

use super::drive::told;
use super::remote::io;
use crate::address::Address;
use crate::protocol::frame::Decoder;
use crate::protocol::frame::control;
use crate::protocol::greeting::{Hello, Purpose, Refusal};
use crate::protocol::message::kind;
use crate::protocol::{ProtocolError, VERSIONS};
use crate::transport;
use kiln_device::Error;
use std::sync::mpsc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Calls `f` with what the server looks like, about once a second, for as long as it gives true.
pub fn watch(address: &Address, mut f: impl FnMut(serde_json::Value) -> bool) -> Result<(), Error> {
    let (send, receive) = mpsc::sync_channel(1);
    let (to, token) = (address.clone(), address.token()?);
    let task = io().spawn(async move {
        let outcome = looks(&to, token, &send).await;
        if let Err(error) = outcome {
            let _ = send.send(Err(error));
        }
    });
    for look in receive {
        if !f(look?) {
            break;
        }
    }
    task.abort();
    Ok(())
}

type Look = Result<serde_json::Value, Error>;

async fn looks(address: &Address, token: Vec<u8>, to: &mpsc::SyncSender<Look>) -> Result<(), Error> {
    let lost = |reason: String| Error::Disconnected { peer: address.to_string(), reason };
    let mut stream = transport::connect(address).await.map_err(|e| lost(e.to_string()))?;
    let given = token.clone();
    let hello = Hello {
        versions: VERSIONS,
        token,
        purpose: Purpose::Watch,
        compress: false,
        program: String::new(),
        table: Vec::new(),
    };
    stream.write_all(&control(kind::HELLO, &hello.encode())).await.map_err(|e| lost(e.to_string()))?;
    let mut decoder = Decoder::default();
    loop {
        while let Some(frame) = decoder.next().map_err(|e: ProtocolError| lost(e.to_string()))? {
            match frame.kind {
                kind::REFUSED => {
                    let refusal = Refusal::decode(frame.payload).map_err(|e| lost(e.to_string()))?;
                    let (peer, reason) = (address.to_string(), told(&refusal, &given));
                    return Err(Error::Refused { peer, reason });
                }
                kind::STATUS => {
                    let status = serde_json::from_slice(frame.payload).map_err(|e| lost(e.to_string()))?;
                    if to.send(Ok(status)).is_err() {
                        return Ok(());
                    }
                }
                _ => {}
            }
        }
        let spare = decoder.spare(16 << 10);
        match stream.read(spare).await.map_err(|e| lost(e.to_string()))? {
            0 => return Err(lost("the server closed the connection".into())),
            n => decoder.filled(n),
        }
    }
}
