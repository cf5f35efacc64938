//! What a browser or a monitor gets on the tensor port.

use super::serve::Server;
use crate::transport::{self, Rewound, Stream};
use std::fmt::Write;
use std::io;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// The longest request.
const MOST: usize = 8 << 10;

/// Answers one request. A WebSocket is upgraded and given back, if sessions are taken this way.
pub async fn serve(server: &Server, mut stream: Stream, sessions: bool) -> io::Result<Option<Stream>> {
    let (mut request, mut seen) = (Vec::new(), 0);
    while !request[seen..].windows(4).any(|w| w == b"\r\n\r\n") {
        // Only what is new is looked at, and what may have begun before it.
        seen = request.len().saturating_sub(3);
        let mut part = [0; 1024];
        let n = stream.read(&mut part).await?;
        if n == 0 || request.len() + n > MOST {
            return Err(io::Error::other("a request that is cut or too long"));
        }
        request.extend_from_slice(&part[..n]);
    }
    let text = String::from_utf8_lossy(&request);
    let upgrade = |line: &str| {
        let line = line.to_ascii_lowercase();
        line.starts_with("upgrade:") && line.contains("websocket")
    };
    let upgrade = text.lines().any(upgrade);
    if upgrade && sessions {
        drop(text);
        let rewound: Stream = Box::new(Rewound::new(request, stream));
        return transport::accept_websocket(rewound).await.map(Some);
    }
    let path = text.split_ascii_whitespace().nth(1).unwrap_or("/");
    let (status, kind, body) = match path.split('?').next().unwrap_or("/") {
        _ if upgrade => ("403 Forbidden", "text/plain", "sessions want TLS here: wss://\n".into()),
        "/" => ("200 OK", "text/html; charset=utf-8", page(server)),
        "/healthz" if server.registry.is_draining() => {
            ("503 Service Unavailable", "text/plain", "draining\n".into())
        }
        "/healthz" => ("200 OK", "text/plain", "ok\n".into()),
        "/metrics" => ("200 OK", "text/plain; version=0.0.4", metrics(server)),
        _ => ("404 Not Found", "text/plain", "there are /, /healthz and /metrics\n".into()),
    };
    let body = if text.starts_with("HEAD") { String::new() } else { body };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    stream.shutdown().await?;
    Ok(None)
}

fn page(server: &Server) -> String {
    let status = server.look();
    format!(
        "<!doctype html><title>Kiln</title><h1>A Kiln compute server</h1>\
         <p>Version {}, up for {:.0} s, {} sessions open, {} since the start.</p>\
         <p>Tensors come here with <code>Device::open(\"kiln://…\")</code>; \
         <a href=\"/metrics\">metrics</a>, <a href=\"/healthz\">health</a>.</p>\n",
        status["version"].as_str().unwrap_or(""),
        status["seconds"].as_f64().unwrap_or(0.0),
        status["sessions"].as_array().map_or(0, Vec::len),
        status["opened"],
    )
}

/// Counters in the text format of Prometheus.
fn metrics(server: &Server) -> String {
    let status = server.look();
    let sessions = status["sessions"].as_array().cloned().unwrap_or_default();
    let sum = |key: &str| sessions.iter().map(|s| s[key].as_u64().unwrap_or(0)).sum::<u64>();
    let mut text = String::new();
    let mut metric = |name: &str, kind: &str, help: &str, value: String| {
        let _ = write!(text, "# HELP kiln_{name} {help}\n# TYPE kiln_{name} {kind}\nkiln_{name} {value}\n");
    };
    metric("uptime_seconds", "gauge", "Time since the start.", format!("{:.3}", server.now().as_secs_f64()));
    metric("sessions", "gauge", "Open sessions.", sessions.len().to_string());
    metric(
        "sessions_opened_total",
        "counter",
        "Sessions since the start.",
        server.registry.opened().to_string(),
    );
    metric("values", "gauge", "Values held by open sessions.", sum("values").to_string());
    metric("value_bytes", "gauge", "Their bytes, by shape.", sum("bytes").to_string());
    metric("queued_tasks", "gauge", "Tasks that wait.", sum("queue").to_string());
    metric("session_operations", "gauge", "Operations of open sessions.", sum("operations").to_string());
    metric(
        "session_busy_microseconds",
        "gauge",
        "Device time of open sessions.",
        sum("busy_micros").to_string(),
    );
    text
}
