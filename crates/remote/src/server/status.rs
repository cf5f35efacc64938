//! What a server looks like, for people and programs.

use super::serve::Server;
use crate::client::core::control;
use crate::protocol::message::kind;
use crate::transport::Stream;
use std::io;
use std::time::Duration;
use tokio::io::{AsyncWriteExt, WriteHalf};

impl Server {
    /// Tells a watcher once a second what the server looks like.
    pub(super) async fn watched(&self, mut writer: WriteHalf<Stream>) -> io::Result<()> {
        loop {
            let status = self.status().to_string();
            writer.write_all(&control(kind::STATUS, status.as_bytes())).await?;
            writer.flush().await?;
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }

    /// What the server looks like, for people and programs.
    pub fn status(&self) -> serde_json::Value {
        let sessions: Vec<_> = self
            .registry
            .list()
            .iter()
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
