//! `kiln devices`: what can be computed on here.

use kiln::remote::Address;
use kiln::{DType, Device};
use std::error::Error;
use std::process::ExitCode;

#[derive(clap::Args)]
pub struct Args {
    /// Servers whose devices to show instead: kiln://host:port, unix:/path, …
    urls: Vec<String>,
    /// One JSON object a device.
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<ExitCode, Box<dyn Error>> {
    let devices = match args.urls.is_empty() {
        true => Device::list(),
        false => {
            let mut devices = Vec::new();
            for url in &args.urls {
                for url in on_server(url)? {
                    devices.push(Device::open(&url)?);
                }
            }
            devices
        }
    };
    for device in devices {
        let (info, memory) = (device.info(), device.memory());
        let usage = |dtype: DType| info.usage(dtype).names().collect::<Vec<_>>();
        if args.json {
            let dtypes: serde_json::Map<_, _> =
                DType::ALL.iter().map(|&d| (d.name().into(), usage(d).into())).collect();
            println!(
                "{}",
                serde_json::json!({
                    "address": device.address(), "id": device.id().0, "name": info.name, "count": info.count,
                    "threads": info.threads(), "numerics": info.numerics, "dtypes": dtypes, "limit": memory.limit,
                })
            );
            continue;
        }
        println!(
            "{:<12} {} · {} of this kind · {} · numerics {}",
            device.address(),
            info.name,
            info.count,
            match info.threads() {
                Some(threads) => format!("{threads} threads"),
                None => "accelerator".into(),
            },
            info.numerics
        );
        for dtype in DType::ALL {
            println!("    {:<5} {}", dtype.name(), usage(dtype).join(" "));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The addresses of all devices of a server, or of the one that is named.
fn on_server(url: &str) -> Result<Vec<String>, Box<dyn Error>> {
    if !Address::is_remote(url) {
        return Ok(vec![url.into()]);
    }
    let address = Address::parse_all(url)?.swap_remove(0);
    if !address.device.is_empty() {
        return Ok(vec![url.into()]);
    }
    let mut names = Vec::new();
    kiln::remote::client::watch(&address, |status| {
        let offered = status["devices"].as_array().into_iter().flatten();
        names.extend(offered.filter_map(|name| name.as_str().map(String::from)));
        false
    })?;
    let joint = if url.contains('?') { '&' } else { '?' };
    Ok(names.iter().map(|name| format!("{url}{joint}device={name}")).collect())
}
