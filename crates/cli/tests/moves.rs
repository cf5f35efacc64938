//! Tensors between servers that are processes of their own.

use kiln::prelude::*;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

struct Server {
    child: Child,
    url: String,
}

impl Server {
    fn start(listen: &str) -> Server {
        let token = std::env::temp_dir().join(format!("kiln-moves-{}.token", std::process::id()));
        std::fs::write(&token, "moves").unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_kiln"));
        command.args(["serve", "--json", "--allow-peer", "127.0.0.1"]);
        command.args(["--listen", listen, "--token-file"]).arg(token);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        let mut first = String::new();
        lines.read_line(&mut first).unwrap();
        std::thread::spawn(move || std::io::copy(&mut lines, &mut std::io::sink()));
        let first: serde_json::Value = serde_json::from_str(&first).unwrap();
        let url = first["url"].as_str().unwrap().to_string();
        Server { child, url }
    }

    fn address(&self) -> String {
        let place = self.url.split('?').next().unwrap();
        place.strip_prefix("kiln://").unwrap().to_string()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn program(first: &Device, second: &Device) -> (Vec<f32>, Vec<f32>) {
    let x = Tensor::arange(0, 1000, 1, first).to_dtype(DType::F32);
    let x = (x * 0.001).requires_grad();
    let y = x.exp().to_device(second).unwrap();
    let z = (&y * &y).to_device(first).unwrap();
    let gradients = (z.clone() + x.clone()).sum(()).backward();
    (z.to_vec().unwrap(), gradients.get(&x).unwrap().to_vec().unwrap())
}

#[test]
fn a_program_over_two_servers_gives_the_bits_of_a_local_one() {
    let (a, b) = (Server::start("127.0.0.1:0"), Server::start("127.0.0.1:0"));
    let (first, second) = (Device::open(&a.url).unwrap(), Device::open(&b.url).unwrap());
    let want = program(&Device::cpu(), &Device::cpu());
    assert_eq!(program(&first, &second), want);
    // A server that is killed is rebuilt, with what came from the other.
    let kept = Tensor::randn([300, 300], &first);
    let before = kept.to_vec::<f32>().unwrap();
    let moved = kept.to_device(&second).unwrap();
    drop(kept);
    second.sync().unwrap();
    let at = b.address();
    drop(b);
    let b = Server::start(&at);
    assert_eq!(moved.to_vec::<f32>().unwrap(), before);
    assert_eq!(program(&first, &second), want);
    // A program that ends leaves no session behind.
    Device::close_all();
    let start = Instant::now();
    for server in [&a, &b] {
        let address = kiln::remote::Address::parse(&server.url).unwrap();
        kiln::remote::client::watch(&address, |look| {
            assert!(start.elapsed() < Duration::from_secs(5), "a session is left: {look}");
            look["sessions"].as_array().is_none_or(|sessions| !sessions.is_empty())
        })
        .unwrap();
    }
}
