//! What a server looks like, for people and programs.

use super::serve::{HELLO, Server};
use crate::protocol::frame::control;
use crate::protocol::greeting::{Refusal, Welcome};
use crate::protocol::message::kind;
use crate::transport::Stream;
use std::io;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Sessions that are told of one by one: all of them fit into a frame.
const MOST_TOLD: usize = 1024;

impl Server {
    /// Tells a watcher once a second what the server looks like.
    pub(super) async fn watched(&self, stream: Stream, welcome: &Welcome) -> io::Result<()> {
        let (mut reader, mut writer) = tokio::io::split(stream);
        let Ok(_place) = self.watching.try_acquire() else {
            let full = Refusal::Other("too many look on".into());
            let told = control(kind::REFUSED, &full.encode());
            return tokio::time::timeout(HELLO, writer.write_all(&told)).await?;
        };
        let tell = async {
            writer.write_all(&control(kind::WELCOME, &welcome.encode())).await?;
            loop {
                let status = self.look().to_string();
                let told = async {
                    writer.write_all(&control(kind::STATUS, status.as_bytes())).await?;
                    writer.flush().await
                };
                // Who does not read is not written to.
                tokio::time::timeout(HELLO, told).await??;
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        };
        // It says nothing further; what it says all the same is dropped, and its end is noticed.
        let gone = async {
            let mut words = [0; 64];
            while !matches!(reader.read(&mut words).await, Ok(0) | Err(_)) {}
        };
        tokio::select! {
            told = tell => told,
            () = gone => Ok(()),
        }
    }

    /// What the server looks like, for people and programs.
    pub fn status(&self) -> serde_json::Value {
        let sessions: Vec<_> = self
            .registry
            .list()
            .iter()
            .take(MOST_TOLD)
            .map(|client| {
                let (queue, tasks, micros) = client.session().load();
                let counts = client.session().counts();
                // A session that computes is not interrupted to be looked at.
                let held = client.try_held();
                serde_json::json!({
                    "session": format!("{:016x}", client.number), "program": client.program,
                    "device": client.device, "seconds": (self.now() - client.opened).as_secs_f64(),
                    "connected": client.is_connected(), "queue": queue, "tasks": tasks, "busy_micros": micros,
                    "values": held.map(|h| h.0), "bytes": held.map(|h| h.1), "operations": held.map(|h| h.2),
                    "received_bytes": counts.received_bytes, "sent_bytes": counts.sent_bytes,
                })
            })
            .collect();
        serde_json::json!({
            "version": env!("CARGO_PKG_VERSION"), "seconds": self.now().as_secs_f64(),
            "draining": self.registry.is_draining(), "opened": self.registry.opened(), "sessions": sessions,
            "exposed": self.registry.moves().count(), "devices": self.registry.config().offered,
        })
    }
}
