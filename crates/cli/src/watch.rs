//! `kiln ps` and `kiln top`: the sessions of a server.

use kiln::remote::Address;
use serde_json::Value;
use std::collections::HashMap;
use std::error::Error;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;

#[derive(clap::Args)]
pub struct Args {
    /// The server: kiln://host:port, unix:/path, …; else KILN_REMOTE_ADDRESS, else the one on this machine.
    url: Option<String>,
    /// One JSON object a look.
    #[arg(long)]
    json: bool,
}

impl Args {
    fn address(&self) -> Result<Address, kiln::Error> {
        let named = kiln_env::REMOTE_ADDRESS.get();
        Address::parse(self.url.as_deref().or(named.as_deref()).unwrap_or("kiln://127.0.0.1:7717"))
    }
}

/// One look.
pub fn ps(args: Args) -> Result<ExitCode, Box<dyn Error>> {
    let mut looks = 0;
    kiln::remote::client::watch(&args.address()?, |status| {
        looks += 1;
        match args.json {
            true => println!("{status}"),
            false => print!("{}", table(&status, None)),
        }
        false
    })?;
    Ok(if looks > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A look a second, until interrupted.
pub fn top(args: Args) -> Result<ExitCode, Box<dyn Error>> {
    let clear = std::io::stdout().is_terminal();
    let mut before: Option<Value> = None;
    kiln::remote::client::watch(&args.address()?, |status| {
        match args.json {
            true => println!("{status}"),
            false => {
                if clear {
                    print!("\x1b[H\x1b[2J");
                }
                print!("{}", table(&status, before.as_ref()));
            }
        }
        before = Some(status);
        // A closed pipe ends it.
        std::io::stdout().flush().is_ok()
    })?;
    Ok(ExitCode::SUCCESS)
}

/// A text of the server, which any of its clients may have chosen.
fn shown(text: &Value) -> String {
    kiln::remote::protocol::plain(text.as_str().unwrap_or("?"))
}

/// Sessions as lines; rates since `before`, or since the session began.
fn table(status: &Value, before: Option<&Value>) -> String {
    let sessions = |status: &Value| status["sessions"].as_array().cloned().unwrap_or_default();
    let number = |value: &Value, key: &str| value[key].as_f64().unwrap_or(0.0);
    let last: HashMap<String, Value> = before
        .map(|b| sessions(b).into_iter().map(|s| (s["session"].to_string(), s)).collect())
        .unwrap_or_default();
    let span = before.map(|b| number(status, "seconds") - number(b, "seconds"));
    let mut text = format!(
        "kiln {} · up {:.0} s · {} sessions, {} since the start{}\n{:<18}{:<24}{:>9}{:>12}{:>12}{:>8}{:>8}{:>12}\n",
        shown(&status["version"]),
        number(status, "seconds"),
        sessions(status).len(),
        number(status, "opened"),
        if status["draining"] == true { " · draining" } else { "" },
        "session",
        "program",
        "values",
        "bytes",
        "ops/s",
        "busy",
        "queue",
        "network"
    );
    for session in sessions(status) {
        let old = last.get(&session["session"].to_string());
        let rate = |key: &str| {
            let (from, over) = match (old, span) {
                (Some(old), Some(span)) => (number(old, key), span),
                _ => (0.0, number(&session, "seconds")),
            };
            (number(&session, key) - from) / over.max(1e-3)
        };
        let held = |key: &str| session[key].as_u64().map_or("…".into(), |n| n.to_string());
        text.push_str(&format!(
            "{:<18}{:<24}{:>9}{:>12}{:>12.0}{:>7.0}%{:>8}{:>10.1}/s{}\n",
            shown(&session["session"]),
            shown(&session["program"]),
            held("values"),
            held("bytes"),
            rate("operations"),
            rate("busy_micros") / 1e4,
            held("queue"),
            (rate("received_bytes") + rate("sent_bytes")) / 1e6,
            if session["connected"] == true { "" } else { "  (away)" },
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_clients_call_themselves_does_not_steer_the_terminal() {
        let name = "evil\x1b]0;title\x07\x1b[2J\nfake 1 2 3\u{9b}31m";
        let session =
            serde_json::json!({ "session": "s1", "program": name, "connected": true, "seconds": 1.0 });
        let status =
            serde_json::json!({ "version": "1\x1b[H", "seconds": 1.0, "sessions": [session], "opened": 1 });
        let text = table(&status, None);
        assert!(text.contains("evil") && text.lines().count() == 3, "{text:?}");
        assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text:?}");
    }
}
