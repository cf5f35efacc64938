//! A server with operations of its own. `kiln serve` cannot know them, so a program of a page registers them and serves;
//! its clients register the same ones, which gives them shapes, gradients and a name to call.
//!
//!     cargo run --example custom_server                  # starts the server as a process of its own, and uses it
//!     cargo run --example custom_server -- serve PATH    # only the server, on a Unix socket

use kiln::ir::custom::{CustomOp, register};
use kiln::ir::{CustomCall, Meta, Op, OpError, V};
use kiln::prelude::*;
use kiln::remote::server::registry::{Config, Registry};
use kiln::remote::server::session::Quota;
use kiln::remote::server::{Listen, Server};
use smallvec::{SmallVec, smallvec};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// x · sigmoid(x). It says what it is in built-in operations, so the server fuses it with what is around it.
struct Swish;

impl CustomOp for Swish {
    fn name(&self) -> &str {
        "demo.swish"
    }

    fn infer(&self, _: &[u8], ins: &[Meta]) -> Result<SmallVec<[Meta; 2]>, OpError> {
        match ins {
            [x] if x.dtype.is_float() => Ok(smallvec![*x]),
            _ => Err(OpError::Custom { op: self.name().into(), message: "it takes one float tensor".into() }),
        }
    }

    fn eval(&self, _: &[u8], _: &[(Meta, &[u8])], _: &mut [(Meta, &mut [u8])]) -> Result<(), String> {
        Err("its lowering is what it means".into())
    }

    fn lower<'a>(&self, _: &[u8], ins: &[V<'a>]) -> Option<SmallVec<[V<'a>; 2]>> {
        Some(smallvec![ins[0] * ins[0].sigmoid()])
    }

    fn grad<'a>(
        &self,
        _: &[u8],
        grads: &[Option<V<'a>>],
        ins: &[V<'a>],
        _: &[V<'a>],
        _: usize,
    ) -> Option<V<'a>> {
        let (x, s) = (ins[0], ins[0].sigmoid());
        Some(grads[0]? * (s + x * s * (s * -1.0 + 1.0)))
    }
}

/// The process that computes, for each element: host code, which runs where the device is.
struct Process;

impl CustomOp for Process {
    fn name(&self) -> &str {
        "demo.process"
    }

    fn infer(&self, _: &[u8], ins: &[Meta]) -> Result<SmallVec<[Meta; 2]>, OpError> {
        Ok(ins.iter().take(1).map(|x| Meta { dtype: DType::U32, shape: x.shape }).collect())
    }

    fn eval(&self, _: &[u8], _: &[(Meta, &[u8])], outs: &mut [(Meta, &mut [u8])]) -> Result<(), String> {
        outs[0].1.chunks_exact_mut(4).for_each(|id| id.copy_from_slice(&std::process::id().to_le_bytes()));
        Ok(())
    }

    fn pure(&self) -> bool {
        false
    }
}

fn call(name: &str, x: &Tensor) -> Tensor {
    let call = CustomCall { name: name.into(), attrs: Vec::new() };
    Tensor::apply(Op::Custom(Arc::new(call)), &[x]).swap_remove(0)
}

fn main() -> Outcome {
    register(Swish)?;
    register(Process)?;
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments[..] {
        [serve, path] if serve == "serve" => serve_at(Path::new(path)),
        _ => client(),
    }
}

/// Serves until the standard input ends.
fn serve_at(path: &Path) -> Outcome {
    let registry = Registry::new(Config {
        // Who may open the socket's folder may connect.
        token: None,
        quota: Quota { bytes: 1 << 30, ..Quota::default() },
        most_sessions: 16,
        lease: Duration::from_secs(60),
        heartbeat: Duration::from_secs(5),
        offered: vec!["cpu".into()],
        devices: Box::new(|_| Some(Arc::new(kiln::device::Cpu::start()))),
        random: Box::new(|bytes| getrandom::fill(bytes).expect("the system gives random bytes")),
    });
    let server = Server::new(registry, |event| eprintln!("{event:?}"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listen = Listen { tcp: Vec::new(), unix: vec![path.into()], tls: None };
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        let sockets = listen.bind().await?;
        println!("serving at unix:{}", path.display());
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
            drop(end);
        });
        let ended = async { drop(ended.await) };
        server.run(sockets, 2, ended, Duration::from_secs(2)).await;
        Ok(())
    })
}

fn client() -> Outcome {
    let folder = std::env::temp_dir().join(format!("kiln-custom-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let socket = folder.join("socket");
    let mut server = start(&socket)?;
    let outcome = compute(&format!("unix:{}", socket.display()), server.id());
    // Its input ends, and so does the server.
    drop(server.stdin.take());
    server.wait()?;
    std::fs::remove_dir_all(&folder)?;
    outcome
}

/// This program again, as a server that is ready.
fn start(socket: &Path) -> Outcome<Child> {
    use std::io::BufRead;
    let mut server = Command::new(std::env::current_exe()?)
        .arg("serve")
        .arg(socket)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    std::io::BufReader::new(server.stdout.take().ok_or("no output")?).read_line(&mut line)?;
    print!("{line}");
    Ok(server)
}

fn compute(url: &str, server: u32) -> Outcome {
    let there = Device::open(url)?;
    let (measured, profile) = there.profiled(None)?;
    let program = |device: &Device| -> Outcome<(Vec<f32>, Vec<f32>)> {
        let x = Tensor::from_vec(vec![-1.0f32, 0.0, 0.5, 2.0], [4], device).requires_grad();
        let y = call("demo.swish", &(&x * 2.0)) + 1.0;
        let slope = grad(&y.sum(()), &[&x]).remove(0);
        Ok((y.to_vec()?, slope.to_vec()?))
    };
    let (values, slopes) = program(&measured)?;
    println!("swish there: {values:?}, its slope: {slopes:?}");
    assert_eq!((values, slopes), program(&Device::cpu())?, "the bits of this machine's CPU");

    let group =
        profile.rows().into_iter().find(|row| row.name.contains("sigmoid")).ok_or("it has not run")?;
    println!("the server ran it as `{}`", group.name);
    assert!(group.name.contains("mul") && group.name.contains("add"), "one group with what is around it");

    let ids = call("demo.process", &Tensor::zeros([2], &there)).to_vec::<u32>()?;
    println!("host code ran in process {}, this one is {}", ids[0], std::process::id());
    assert_eq!(ids, [server, server]);
    there.close();
    Ok(())
}
